"""Plans for devices that are not here: real compilers, in the environment .aot, through the command itself."""

import json
import os
import subprocess
from typing import Any

import pytest

from jaxvllm.planner.known_models import find_config
from pallas_kernels.chips import GpuChip
from tests.planner.deployments import deployment
from tools.aot import AOT, ROOT

# XLA:GPU's workspace for cuBLASLt, of a fixed size (compiled HLO, jax 0.11.2).
WORKSPACE = 32 * 2**20
# XLA:TPU keeps the small tuples of the sampling's conditionals 16 KiB apart: the arrays of Llama's decode scratch are
# 0.7 MB, and their offsets reach 2.3 MB (buffer assignment, libtpu 0.0.48.1). Less than any weight looked for here.
TUPLES = 3 * 2**20


def spare_bytes(device: str) -> int:
    """What a step's scratch holds beside arrays of the model, on a device of this name."""
    is_gpu = isinstance(deployment("Llama-3.1-8B", device).target.chip, GpuChip)
    return WORKSPACE if is_gpu else TUPLES


def run_python(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    if not (AOT / "bin" / "python").is_file():
        missing = "needs the environment .aot: make .aot/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return subprocess.run([AOT / "bin" / "python", *argv], capture_output=True, text=True, cwd=ROOT, **options)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "jaxvllm", "plan", *argv)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v5e", "h200"])
def test_llama_8b_on_eight(device: str) -> None:
    # So few tokens that activations are smaller than a weight, and a copied weight or page cannot hide among them.
    # Seven slots and the trash slot fill the tiles of eight rows in which a TPU keeps the state of the slots.
    # A half of the model's length keeps the slots' history, 4 MiB at the whole of it, smaller than a weight, too.
    limits = {"mesh": "1x8", "max_num_seqs": 7, "max_num_batched_tokens": 64, "max_model_len": 65536}
    flags = [part for name, value in limits.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    done = run("--model", "Llama-3.1-8B", "--device", device, *flags, "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    share = deployment("Llama-3.1-8B", device, **limits).share
    assert planned["fits"]
    assert planned["memory"]["weights"] == share.weight_bytes
    findings = planned["findings"]
    for step in (findings["largest"], findings["decode"]):
        assert step["step_bytes"] - spare_bytes(device) < share.smallest_matrix_bytes < findings["pool_bytes"] // 1000
        # Nor is there a copy in a TPU's VMEM, which temporaries do not count. The largest array there is one of logits:
        # 64 tokens over a device's eighth of the vocabulary, 3.9 MiB.
        assert step["vmem_array_bytes"] < share.smallest_matrix_bytes
        # What goes in is what the planner counts; the compiler adds a little to align.
        counted = share.weight_bytes + planned["memory"]["state"] + findings["pool_bytes"]
        assert 0 <= step["argument_bytes"] - counted < 2 * 2**20
        always = [(c["kind"], c["count"], c["num_bytes"]) for c in step["collectives"] if not c["conditional"]]
        assert always == [
            ("all-reduce", 2 * 32 + 1, step["num_tokens"] * 4096 * 2),  # two a layer and the embedding's, in bfloat16
            ("all-gather", 1, 8 * 2 * step["num_rows"] * 4),  # the best token of each device
        ]
    assert findings["largest"]["seconds"] + findings["decode"]["seconds"] < 120


# What the planner's process does, for the decode step alone.
COMPILE_DECODE = """
import json, sys
from dataclasses import asdict
from jaxvllm.planner.compile_worker import Steps
from jaxvllm.planner.deployment import Deployment

deployment = Deployment.from_json(sys.stdin.read())
print(json.dumps(asdict(Steps(deployment).compile(deployment.decode))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "mesh"), [("v5e", "1x2"), ("h200", "1x1")])
def test_layers_in_periods_copy_nothing(device: str, mesh: str) -> None:
    # Layers of Gemma 3 27B: two periods of three and two more, each loop reading its slices of the same stacks. A
    # smaller vocabulary compiles sooner, and its logits hide no copy; on two devices it is too large for a TPU's VMEM.
    config = find_config("gemma-3-27b-it")[1]
    small = config | {"num_hidden_layers": 8, "sliding_window_pattern": 3, "vocab_size": 32768}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
    planned = deployment(small, device, mesh=mesh, **limits)
    done = run_python("-c", COMPILE_DECODE, input=planned.to_json())
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout.splitlines()[-1])
    assert step["step_bytes"] - spare_bytes(device) < planned.share.smallest_matrix_bytes
    assert step["vmem_array_bytes"] < planned.share.smallest_matrix_bytes


@pytest.mark.slow
def test_a_step_without_room_does_not_fit() -> None:
    # The weights take 6 of 15.75 GiB, and activations of so many tokens 59: XLA:TPU compiles no such program.
    # Requests are short, because slots for long ones would already leave no room for pages.
    flags = ["--max-num-batched-tokens", "20000", "--max-num-seqs", "20000", "--max-model-len", "1024"]
    done = run("--model", "Llama-3.2-3B", "--device", "v5e", *flags)
    assert done.returncode == 1
    assert "finds no room for a step: RESOURCE_EXHAUSTED" in done.stdout
    assert "about 1x2 of v5e would hold it" in done.stderr
    assert "lower max_num_batched_tokens" in done.stderr
