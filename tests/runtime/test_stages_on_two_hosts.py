"""Stages on two v5e hosts of four chips, by the real compiler: only collective-permutes go from host to host."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools.aot import AOT, ROOT

PROGRAM = """
import json, re, sys
from pathlib import Path
from jaxvllm.models.params import abstract_params
from jaxvllm.planner.hlo import largest_vmem_array, read_collectives
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.deviceless import compile_only_devices
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tools.aot_programs import DTYPE, WIDE

chip, spec = chip_named("v5e"), WIDE.spec
backend = Backend.of_chip(chip)
mesh = make_mesh(MeshShape(data=1, model=4, stages=2), compile_only_devices(chip, 8, hosts=2))
hosts = [device.process_index for device in mesh.devices.flat]
shape = CacheShape(2000, 16, num_slots=16, max_pages=64, dtype=DTYPE, step_tokens=2048)
pages = shape.pages(spec, backend, mesh)
compiler = StepCompiler(abstract_params(spec, DTYPE, "stacked", mesh), pages, spec, shape, backend, mesh)
found = []
for bucket in (Bucket(16, 16), Bucket(2048, 16)):
    program = compiler.compile_begin(bucket)
    text, memory = program.as_text(), program.memory_analysis()
    found.append(dict(
        axes=re.findall(r"replica_groups=mesh\\[[^\\]]*\\] (\\{[^}]*\\})", text),
        groups=text.count("replica_groups="),
        pairs=[[hosts[int(end)] for end in pair.split(",")]
               for pairs in re.findall(r"source_target_pairs=\\{(.*?)\\}\\}", text)
               for pair in re.findall(r"\\{(\\d+,\\d+)", pairs)],
        permutes=[[c.count, c.num_bytes] for c in read_collectives(text) if c.kind == "collective-permute"],
        temporaries=memory.temp_size_in_bytes,
        in_place=memory.alias_size_in_bytes,
    ))
pool = sum(page.size * page.dtype.itemsize // mesh.size for page in pages)
Path(sys.argv[1]).write_text(json.dumps([hosts, pool, found]))
"""


@pytest.mark.slow
def test_only_activations_cross_from_host_to_host(tmp_path: Path) -> None:
    if not (AOT / "bin" / "python").is_file():
        missing = "needs the environment .aot: make .aot/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    argv = [AOT / "bin" / "python", "-c", PROGRAM, tmp_path / "found"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    hosts, pool, (decode, mixed) = json.loads((tmp_path / "found").read_text())
    assert hosts == [0, 0, 0, 0, 1, 1, 1, 1], "a stage is a host"
    for step in (decode, mixed):
        assert set(step["axes"]) == {"{'model'}"} and len(step["axes"]) == step["groups"]
        assert all(source != target for source, target in step["pairs"])
        assert step["in_place"] >= pool
    # One microbatch in two ticks, and two in three, of activations in bfloat16: a quarter from each device.
    assert decode["permutes"] == [[2, 16 * 8192 * 2 // 4]]
    assert mixed["permutes"] == [[3, 1024 * 8192 * 2 // 4]]
    # The smallest matrix on a device is 32 MiB; of 2048 tokens every array is as large.
    assert decode["temporaries"] < 8 * 2**20
    assert mixed["temporaries"] < 160 * 2**20
