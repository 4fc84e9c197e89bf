"""Compiling for chips that are not here: real compilers, in processes of the environment .aot."""

import json
import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from pallas_kernels.chips import CHIPS, TpuChip, chip_named
from pallas_kernels.deviceless import compile_only_devices
from tools.aot import AOT, ROOT, compile_for
from tools.aot_outcome import Kind


@pytest.fixture
def compilers() -> None:
    """Skips the test where .aot was not built; CI has no excuse."""
    if not (AOT / "bin" / "python").is_file():
        missing = "needs the environment .aot: make .aot/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)


@pytest.mark.parametrize("count", [0, 9])
def test_a_count_that_no_slice_has(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} devices: between 1 and 8"):
        compile_only_devices(chip_named("v5e"), count)


@pytest.mark.parametrize(("chip", "compiler"), [("v5e", "libtpu"), ("h200", "xla_cuda13")])
def test_a_missing_compiler_says_what_to_install(chip: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.deviceless.find_spec", lambda module: None)
    with pytest.raises(RuntimeError, match=rf"{compiler} is not installed: pip install jaxvllm\[aot\]"):
        compile_only_devices(chip_named(chip), 1)


def test_a_process_that_looks_for_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = SimpleNamespace(config=SimpleNamespace(jax_platforms=None))
    monkeypatch.setattr("pallas_kernels.deviceless.jax", unset)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cpu"):
        compile_only_devices(chip_named("v5e"), 1)


# Which devices there are, and on how many hosts; and the collectives of a matmul split over two of them.
DEVICES_PROGRAM = """
import json, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from pallas_kernels.chips import CHIPS
from pallas_kernels.deviceless import compile_only_devices
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

def all_reduces(devices):
    mesh = make_mesh(MeshShape(1, 2), devices)
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    matrix = lambda *axes: jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=place(*axes))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jnp.dot, out_shardings=place()).lower(matrix(None, "model"), matrix("model"))
    return lowered.compile().as_text().count("all-reduce")

for name, chip in CHIPS.items():
    groups = {count: compile_only_devices(chip, count) for count in range(1, 9)}
    kinds = {device.device_kind for devices in groups.values() for device in devices}
    hosts = {device.process_index for device in groups[4]}
    counts = [len(devices) for devices in groups.values()]
    print(json.dumps([name, counts, sorted(kinds), len(hosts), all_reduces(groups[2])]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("compilers")
def test_every_chip_has_one_to_eight_devices() -> None:
    done = subprocess.run(
        [AOT / "bin" / "python", "-c", DEVICES_PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == list(CHIPS)
    for name, counts, kinds, hosts, all_reduces in found:
        assert counts == [1, 2, 3, 4, 5, 6, 7, 8]
        assert kinds == [CHIPS[name].device_kind]
        assert hosts == 1
        assert all_reduces >= 1


# A small set of what `make aot` compiles, for the compilers that differ most.
@pytest.mark.slow
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize(
    ("chip", "kind", "programs"),
    [
        ("v5e", "attention", ["attention/decode-gqa/tpu", "attention/mixed-sinks/tpu"]),
        ("v7x", "attention", ["attention/decode-gqa/tpu", "attention/mixed-sinks/tpu"]),
        ("h200", "attention", ["attention/decode-gqa/gpu", "attention/mixed-sinks/gpu"]),
        ("b200", "attention", ["attention/decode-gqa/gpu"]),
        ("a100", "step", ["step/decode/reference"]),
        ("v5e", "step", ["step/decode/tpu"]),
        ("v7x", "step", ["step/decode/tpu"]),
        ("h200", "step", ["step/decode/gpu"]),
    ],
)
def test_compiles_in_place(chip: str, kind: Kind, programs: Sequence[str]) -> None:
    outcomes = list(compile_for(chip, kind, programs))
    assert [outcome.program for outcome in outcomes] == programs
    for outcome in outcomes:
        assert outcome.status == "ok", outcome.row()
        if kind == "attention":
            assert outcome.kernels, outcome
        for kernel in outcome.kernels:
            facts = CHIPS[chip]
            if isinstance(facts, TpuChip):
                assert kernel.vmem_bytes is not None
                assert 0 < kernel.vmem_bytes < facts.vmem_bytes
            else:
                assert None not in (kernel.shared_memory_bytes, kernel.registers, kernel.spill_bytes)
                assert 0 <= kernel.shared_memory_bytes < facts.shared_memory_per_block
