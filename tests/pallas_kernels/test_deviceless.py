"""Compiling for chips that are not here: real compilers, in processes of the environment .aot."""

import json
import os
import subprocess
from collections.abc import Sequence
from itertools import batched
from types import SimpleNamespace
from typing import Any

import pytest

from pallas_kernels.chips import CHIPS, GpuChip, TpuChip, chip_named
from pallas_kernels.deviceless import CUDA_VERSION, CUDNN_VERSION, compile_only_devices
from tools.aot import AOT, ROOT, compile_for
from tools.aot_outcome import KINDS, Outcome


@pytest.fixture
def compilers() -> None:
    """Skips the test where .aot was not built; CI has no excuse."""
    if not (AOT / "bin" / "python").is_file():
        missing = "needs the environment .aot: make .aot/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)


@pytest.mark.parametrize("count", [0, 17])
def test_a_count_that_no_slice_has(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} devices: between 1 and 16"):
        compile_only_devices(chip_named("v5e"), count)


@pytest.mark.parametrize(("chip", "compiler"), [("v5e", "libtpu"), ("h200", "xla_cuda13")])
def test_a_missing_compiler_says_what_to_install(chip: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.deviceless.find_spec", lambda module: None)
    with pytest.raises(RuntimeError, match=rf"{compiler} is not installed: .*pip install .*jax\[cuda13-local,tpu\]"):
        compile_only_devices(chip_named(chip), 1)


def test_a_process_that_looks_for_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = SimpleNamespace(config=SimpleNamespace(jax_platforms=None))
    monkeypatch.setattr("pallas_kernels.deviceless.jax", unset)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cpu"):
        compile_only_devices(chip_named("v5e"), 1)


# For each chip: which devices there are, on how many hosts, the collectives of a matmul split over two of them, and of
# rows that four of them send each other.
# For a GPU also: the calls that XLA makes of a float8 matmul and of one whose blocks have scales; the versions that the
# CUDA plugin was built with; and what comes of asking for another GPU.
CHIPS_PROGRAM = """
import json, re, sys, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from pallas_kernels.chips import CHIPS, GpuChip
from pallas_kernels.deviceless import compile_only_devices, lowering_for
from jaxvllm.planner.hlo import read_collectives
from sharding.axis import ModelAxis, ReplicaAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.whole_mesh import RaggedSizes, WholeMesh

def exchanged(devices):
    over, mesh = PartitionSpec(("data", "model")), make_mesh(MeshShape(2, 2), devices)
    run = lambda rows, *sizes: WholeMesh(ReplicaAxis(2), ModelAxis(2)).exchange(rows, RaggedSizes(*sizes), 64)
    everywhere = jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)
    shapes = ((4 * 16, 256), jnp.bfloat16), *[((4 * 4,), jnp.int32)] * 4
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, over)) for shape in shapes]
    found = read_collectives(jax.jit(everywhere).lower(*arguments).compile().as_text())
    return [(one.kind, one.count, one.num_bytes, one.over) for one in found]

def hlo(function, devices, shapes, options=None, **axes):
    mesh = make_mesh(MeshShape(1, len(devices)), devices)
    place = lambda *names: NamedSharding(mesh, PartitionSpec(*names))
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=place(*axes.get(name, ()))) for name, shape in shapes.items()]
    with lowering_for(mesh):
        return jax.jit(function, out_shardings=place()).lower(*arguments).compile(options).as_text()

def calls(function, devices, **shapes):
    # Triton would take these matmuls: the engine compiles without it.
    text = hlo(function, devices, shapes, {"xla_gpu_enable_triton_gemm": False})
    return re.findall(r'custom_call_target="([^"]*)"', text)

def about_gpu(chip):
    devices = compile_only_devices(chip, 1)
    f8, e8, bf16 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.bfloat16
    dot = lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=bf16)
    blocks = lambda x, y, s, t: jax.nn.scaled_matmul(x, y, s, t, preferred_element_type=bf16)
    x, y, s, t = ((1, 256, 512), f8), ((1, 1024, 512), f8), ((1, 256, 16), e8), ((1, 1024, 16), e8)
    yield "float8", calls(dot, devices, x=((256, 512), f8), y=((1024, 512), f8))
    yield "blocks", calls(blocks, devices, x=x, y=y, s=s, t=t)
    from jax_cuda13_plugin import _versions
    yield "versions", [_versions.cuda_runtime_build_version(), _versions.cudnn_build_version()]
    compile_only_devices(chip, 2)  # the same again
    other = next(other for other in CHIPS.values() if isinstance(other, GpuChip) and other != chip)
    try:
        compile_only_devices(other, 1)
    except RuntimeError as error:
        yield "other", str(error)

for name in sys.argv[1:]:
    chip, matrix = CHIPS[name], ((512, 512), jnp.float32)
    groups = {count: compile_only_devices(chip, count) for count in range(1, 9)}
    split = hlo(jnp.dot, groups[2], {"x": matrix, "y": matrix}, x=(None, "model"), y=("model",))
    about = {
        "counts": [len(devices) for devices in groups.values()],
        "kinds": sorted({device.device_kind for devices in groups.values() for device in devices}),
        "hosts": len({device.process_index for device in groups[4]}),
        "all_reduces": split.count("all-reduce"),
        "exchanged": exchanged(groups[4]),
    }
    print(json.dumps(about | (dict(about_gpu(chip)) if isinstance(chip, GpuChip) else {})))
"""

# A scan over layers, of which XLA copies each to VMEM for its `ragged_dot`: 4 MiB of experts. The worker of `make aot`
# looks at it twice, once with a limit that the copy reaches.
COPY_PROGRAM = """
import sys, jax, jax.numpy as jnp
from functools import cache
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec
from pallas_kernels.chips import CHIPS
from pallas_kernels.deviceless import compile_only_devices
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tools.aot_programs import Program
from tools.aot_worker import compile_program

@cache
def compile_scan(mesh):
    shapes = ((16, 512), jnp.bfloat16), ((4, 8, 512, 512), jnp.bfloat16), ((8,), jnp.int32)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, PartitionSpec())) for shape in shapes]
    scan = lambda x, w, sizes: jax.lax.scan(lambda x, w: (jax.lax.ragged_dot(x, w, sizes), None), x, w)[0]
    return jax.jit(scan).lower(*arguments).compile()

one = MeshShape(1, 1)
for name in sys.argv[1:]:
    mesh = make_mesh(one, compile_only_devices(CHIPS[name], 1))
    for copy_bytes in (4 * 2**20, 2**30):
        print(compile_program(Program(name, one, 0, copy_bytes, compile_scan), mesh, Path("nowhere")).to_json())
"""


def run_with_compilers(program: str, *argv: str) -> list[str]:
    """What `program` prints in a new process of the environment with the compilers, line by line."""
    done = subprocess.run(
        [AOT / "bin" / "python", "-c", program, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_devices(chip: str, about: dict[str, Any]) -> None:
    assert about["counts"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert about["kinds"] == [CHIPS[chip].device_kind]
    assert about["hosts"] == 1
    assert about["all_reduces"] >= 1
    assert about["exchanged"] == [["ragged-all-to-all", 1, 16 * 256 * 2, "all"]]


@pytest.mark.slow
@pytest.mark.usefixtures("compilers")
def test_every_tpu_has_one_to_eight_devices() -> None:
    chips = [name for name, chip in CHIPS.items() if isinstance(chip, TpuChip)]
    found = run_with_compilers(CHIPS_PROGRAM, *chips)
    assert len(found) == len(chips)
    for chip, line in zip(chips, found, strict=True):
        check_devices(chip, json.loads(line))


@pytest.mark.slow
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize("chip", ["h200", "b200", "l4", "t4"])
def test_every_gpu_has_one_to_eight_devices_and_cuda(chip: str) -> None:
    """A process for each: also that it refuses another GPU, and that XLA uses what the version of CUDA allows."""
    [line] = run_with_compilers(CHIPS_PROGRAM, chip)
    about = json.loads(line)
    check_devices(chip, about)
    facts = CHIPS[chip]
    assert isinstance(facts, GpuChip)
    # Matrix units for float8 came with Ada, for blocks with scales with Blackwell.
    has_float8, has_blocks = facts.compute_capability >= (8, 9), facts.compute_capability >= (10, 0)
    assert ("__cublas$lt$matmul$f8" in about["float8"]) == has_float8, about
    assert ("__cudnn$blockScaledDot" in about["blocks"]) == has_blocks, about
    runtime, cudnn = about["versions"]
    assert f"{runtime // 1000}.{runtime % 1000 // 10}.0" == CUDA_VERSION
    assert f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}" == CUDNN_VERSION
    assert f"this one compiles for {chip}: compile for" in about["other"]


@pytest.mark.slow
@pytest.mark.usefixtures("compilers")
def test_a_copy_to_vmem_is_found() -> None:
    chips = [name for name, chip in CHIPS.items() if isinstance(chip, TpuChip)]
    outcomes = [Outcome.from_json(line) for line in run_with_compilers(COPY_PROGRAM, *chips)]
    assert len(outcomes) == 2 * len(chips)
    for copied, allowed in batched(outcomes, 2):
        # Its temporaries say nothing of it.
        assert copied.temp_bytes < 2**18
        assert (copied.status, allowed.status) == ("failed", "ok")
        assert copied.vmem_array_bytes >= 4 * 2**20
        assert "512,512] in VMEM reaches 4194304 bytes: pages or a weight are copied" in copied.message


# A small set of what `make aot` compiles, for the compilers that differ most. The kernels for a chip have one process.
# Where rows alone decode, attention is in the steps below, and in those of tests/planner/test_devices_not_here.py.
# A burst is decode steps in a loop. On a second chip of a compiler the step is split: what samples is compiled for the
# first one.
@pytest.mark.slow
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize(
    ("chip", "programs"),
    [
        (
            "v5e",
            [
                "attention/mixed-sinks/tpu",
                "quantized/qwen3-8b-gate-up-int4-decode-16/tpu",
                "states/qwen3-next-mixed-512/tpu",
            ],
        ),
        (
            "v6e",
            [
                "quantized/qwen3-8b-down-awq-decode-16/tpu",
                "quantized/nvfp4-decode-16/tpu",
                "states/qwen3-next-decode-64/tpu",
            ],
        ),
        (
            "v7x",
            [
                "attention/decode-gqa/tpu",
                "attention/mixed-sinks/tpu",
                "quantized/gpt-oss-20b-expert-mxfp4-decode-4/tpu",
                "states/kimi-linear-decode-64/tpu",
            ],
        ),
        (
            "h200",
            [
                "attention/mixed-sinks/gpu",
                "attention/prefill-2048-heads-int8/gpu",
                "attention/decode-64x4096-latent-fp8/gpu",
                "experts/qwen3-30b-decode-64/gpu",
                "quantized/qwen3-8b-gate-up-int4-prefill-2048/gpu",
                "states/nemotron-nano-decode-64/gpu",
                "states/qwen3-next-prompt-2048/gpu",
                "states/lfm2-prompt-512/gpu",
            ],
        ),
        ("b200", ["attention/decode-gqa/gpu", "quantized/nvfp4-prefill-2048/gpu"]),
        ("a100", ["attention/decode-64x4096-heads-fp8/gpu"]),
        # An instruction for Turing alone, copies without a copy engine, and the shared memory of a GPU for desks.
        (
            "t4",
            [
                "attention/mixed-sinks/gpu",
                "quantized/qwen3-8b-down-awq-decode-16/gpu",
                "quantized/nvfp4-decode-16/gpu",
            ],
        ),
        ("l4", ["quantized/qwen3-8b-gate-up-int4-decode-16/gpu"]),
        (
            "pro6000",
            [
                "attention/mixed-sinks/gpu",
                "experts/qwen3-30b-decode-64/gpu",
                "quantized/qwen3-8b-gate-up-int4-prefill-2048/gpu",
            ],
        ),
        ("v5e", ["step/burst/tpu/1x2", "step/sample/tpu/1x2", "step/decode-narrow/tpu"]),
        ("v6e", ["step/mixed-experts/tpu", "step/decode-int4/tpu"]),
        ("v7x", ["step/split-narrow/tpu"]),
        ("h200", ["step/burst/gpu/1x2", "step/decode-int4/gpu"]),
    ],
)
def test_compiles_in_place(chip: str, programs: Sequence[str]) -> None:
    kinds = [kind for kind in KINDS if any(program.startswith(f"{kind}/") for program in programs)]
    outcomes = list(compile_for(chip, kinds, programs))
    assert [outcome.program for outcome in outcomes] == programs
    for outcome in outcomes:
        assert outcome.status == "ok", outcome.row(chip)
        if kinds != ["step"]:
            assert outcome.kernels, outcome
        for kernel in outcome.kernels:
            facts = CHIPS[chip]
            if isinstance(facts, TpuChip):
                assert kernel.vmem_bytes is not None
                assert 0 < kernel.vmem_bytes < facts.vmem_bytes
            else:
                assert kernel.ptx_target == facts.ptx_target
                assert None not in (kernel.shared_memory_bytes, kernel.registers, kernel.spill_bytes)
                assert 0 <= kernel.shared_memory_bytes < facts.shared_memory_per_block
