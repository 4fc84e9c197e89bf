"""Measures what an update of the weights costs a running engine whose trainer holds arrays in the engine's places.

The model has the size of Qwen3 0.6B and random weights. Two trees of arrays take turns: the engine's own, and a copy of
it. While requests run, each update must use the very buffers that it is given, and compile nothing. This prints the
milliseconds of an update, and writes benchmarks/results/weight-updates-DATE-COMMIT.json. An update is host work alone,
so the least of many is the figure where other processes share the cores.

    python -m benchmarks.weight_updates [--updates 200] [--dtype bfloat16] [--kv drop]
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from benchmarks.qwen3 import qwen3_600m, write_model
from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm import LLM, SamplingParams
from jaxvllm.core.weight_version import KVChange
from jaxvllm.models.params import Params

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
PROMPT = list(range(5, 37))
NUM_REQUESTS = 4
STEPS_BETWEEN = 25  # updates between two steps of the engine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv", choices=("drop", "keep"), default="drop")
    args = parser.parse_args()
    device = machine()
    options: dict[str, Any] = dict(
        load_format="dummy",
        dtype=args.dtype,
        max_model_len=256,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=64,
        token_buckets=(64,),
        row_buckets=(NUM_REQUESTS,),
        num_pages=65,
        max_decode_burst=1,
        warm_up="full",
        speculation=False,
    )
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), qwen3_600m())
        with LLM(name, **options) as llm:
            found = measure(llm, args.updates, args.kv)
    print(f"{found['arrays']} arrays of {found['bytes'] / 1e9:.2f} GB: {spread(found['milliseconds'], 2)} ms an update")
    print(f"copied {found['copied']} arrays, compiled {found['compiled']}, arrays left over: {found['left']}")
    print(write_record("weight-updates", device, {"options": vars(args)} | found).relative_to(ROOT))


def measure(llm: LLM, count: int, kv: KVChange) -> dict[str, Any]:
    """Returns the milliseconds of each of `count` updates between steps of running requests, and what they left."""
    trees = [llm.weights, jax.tree.map(lambda array: (array + 0).block_until_ready(), llm.weights)]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for number in range(NUM_REQUESTS):
        llm.engine.submit(llm.engine.check(str(number), PROMPT, params))
    for tree in trees * 2:  # whatever is made once is made now
        llm.update_weights(tree, kv=kv)
        llm.engine.step()
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILE_EVENT:
            compiled.append(str(details.get("fun_name", "?")))

    gc.collect()
    before, copied, milliseconds = num_arrays(), 0, list[float]()
    monitoring.register_event_duration_secs_listener(listen)
    for number in range(count):
        tree = trees[number % 2]
        start = time.perf_counter()
        llm.update_weights(tree, f"update {number}", kv)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        copied += sum(a != b for a, b in zip(pointers(llm.weights), pointers(tree), strict=True))
        if number % STEPS_BETWEEN == 0:
            llm.engine.step()
    monitoring.unregister_event_duration_listener(listen)
    while llm.engine.has_work:
        llm.engine.step()
    gc.collect()
    leaves = jax.tree.leaves(trees[0])
    return {
        "arrays": len(leaves),
        "bytes": sum(array.nbytes for array in leaves),
        "milliseconds": milliseconds,
        "copied": copied,
        "compiled": len(compiled),
        "left": num_arrays() - before,
    }


def num_arrays() -> int:
    """Returns how many arrays there are in this process."""
    return len(jax.live_arrays())  # type: ignore[no-untyped-call]


def pointers(tree: Params) -> list[int]:
    """Returns the addresses of the buffers of all arrays, on each of their devices."""
    return [shard.data.unsafe_buffer_pointer() for array in jax.tree.leaves(tree) for shard in array.addressable_shards]


if __name__ == "__main__":
    main()
