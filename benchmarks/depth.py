"""Measures how long a step takes to compile for models of 8, 32 and 80 layers, for chips that are not here.

The layers are those of Qwen3 1.7B, so that 80 of them fit a v5e. There are two programs: a decode step of 64 rows, and
the forward pass of a step with 256 tokens of prompts in 8 rows. Each chip has a process of its own, because a plugin is
chosen when jax is imported, and the first depth is compiled once before it is measured. Prints a table of the seconds
of CPU, which other work on the machine disturbs less than those on the clock, and writes both to
benchmarks/results/depth-DATE-COMMIT.json.

    python -m benchmarks.depth [--chips v5e h200] [--rounds 3] [--python .aot/bin/python]
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.qwen3 import qwen3
from benchmarks.result_files import ROOT, machine, write_record

DEPTHS = (8, 32, 80)
MODEL = qwen3(28, 2048, 6144, 16, 8, 128, 151_936, max_position_embeddings=8192, tie_word_embeddings=True)


def compile_all(chip_name: str, rounds: int) -> list[dict[str, Any]]:
    """Returns the seconds of each program, `rounds` times. It needs the chip's compiler."""
    import jax
    import jax.numpy as jnp

    from jaxvllm.models.families import model_spec
    from jaxvllm.models.params import abstract_params
    from jaxvllm.runtime.buckets import Bucket
    from jaxvllm.runtime.cache_shape import CacheShape
    from jaxvllm.runtime.step_program import StepCompiler
    from pallas_kernels.backend import Backend
    from pallas_kernels.chips import chip_named
    from pallas_kernels.deviceless import compile_only_devices
    from sharding.mesh import MeshShape
    from sharding.placement import make_mesh

    chip = chip_named(chip_name)
    mesh = make_mesh(MeshShape(1, 1), compile_only_devices(chip, 1))
    backend, dtype = Backend.of_chip(chip), jnp.dtype(jnp.bfloat16)
    buckets = {"decode": Bucket(64, 64), "prompts": Bucket(256, 8)}
    shape = CacheShape(num_pages=256, page_size=16, num_slots=64, max_pages=512, dtype=dtype, step_tokens=256)
    results = []
    for round_ in range(rounds + 1):
        for depth in DEPTHS:
            spec = model_spec(MODEL | {"num_hidden_layers": depth})
            params = abstract_params(spec, dtype, "stacked", mesh)
            for name, bucket in buckets.items():
                jax.clear_caches()  # type: ignore[no-untyped-call]
                compiler = StepCompiler(params, shape.pages(spec, backend, mesh), spec, shape, backend, mesh)
                start, cpu = time.perf_counter(), time.process_time()
                compiler.compile_begin(bucket)
                one: dict[str, Any] = {"chip": chip_name, "layers": depth, "program": name}
                one |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
                if round_:  # the first warms the compiler up
                    results.append(one)
            if not round_:
                break
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e", "h200"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", type=Path, default=ROOT / ".aot" / "bin" / "python", help="one with the compilers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(compile_all(args.chips[0], args.rounds)))
        return
    device = machine()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    results: list[dict[str, Any]] = []
    for chip in args.chips:
        command = [args.python, "-m", "benchmarks.depth", "--worker", "--chips", chip, "--rounds", str(args.rounds)]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        results += json.loads(done.stdout.splitlines()[-1])
    print(f"| chip | program | {' | '.join(f'{depth} layers' for depth in DEPTHS)} |")
    print("|---|---|" + "---|" * len(DEPTHS))
    for chip in args.chips:
        for name in ("decode", "prompts"):
            cells = []
            for depth in DEPTHS:
                key = (chip, name, depth)
                times = [one["cpu_seconds"] for one in results if (one["chip"], one["program"], one["layers"]) == key]
                cells.append(f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})")
            print(f"| {chip} | {name} | {' | '.join(cells)} |")
    print(f"\nwritten to {write_record('depth', device, {'results': results}).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
