"""Plans for devices that are not here: real compilers, in the environment .aot."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from jaxvllm.planner import capacity_plan
from jaxvllm.planner.capacity_plan import CapacityPlan, Question, make_plan
from jaxvllm.planner.compiler import Findings, StepFindings
from jaxvllm.planner.deployment import Deployment
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


# So few tokens that activations are smaller than a weight, and a copied weight or page cannot hide among them.
# Seven slots and the trash slot fill the tiles of eight rows in which a TPU keeps the state of the slots.
# A half of the model's length keeps the slots' history, 4 MiB at the whole of it, smaller than a weight, too.
LLAMA = {"mesh": "1x8", "max_num_seqs": 7, "max_num_batched_tokens": 64, "max_model_len": 65536}
# Layers of Gemma 3 27B: two periods of three and two more, each loop reading its slices of the same stacks. A smaller
# vocabulary compiles sooner, and its logits hide no copy.
GEMMA = find_config("gemma-3-27b-it")[1]
GEMMA |= {"num_hidden_layers": 8, "sliding_window_pattern": 3, "vocab_size": 32768}
GEMMA_LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
# On two devices the vocabulary is too large for a TPU's VMEM.
GEMMA_MESHES = {"v5e": "1x2", "h200": "1x1"}

# Each kind of device has a decode step of one model and a step with prompts of the other. Gemma's on H200 takes 16.8 s
# of the CPU where rows decode and 21.4 with prompts, and Llama's 12.1 and 8.7; on v5e they differ by one second.
LLAMA_STEP = {"v5e": "decode", "h200": "largest"}
GEMMA_STEP = {"v5e": "largest", "h200": "decode"}

# What the planner's process does, but for the program that samples after a step with prompts: the decode step has the
# same inside. All that the command compiles for a TPU is compiled by the notebook meshes_and_planner (test_colab.py).
COMPILE = """
import json, sys
from dataclasses import asdict
from jaxvllm.planner.compile_worker import CompiledSteps
from jaxvllm.planner.deployment import Deployment
from jaxvllm.runtime.step_program import StepCompiler, StepProgram

StepCompiler.compile = lambda self, bucket: StepProgram(self.compile_begin(bucket))
for line in sys.stdin:
    names, text = json.loads(line)
    deployment = Deployment.from_json(text)
    steps = CompiledSteps(deployment)
    found = {name: asdict(steps.compile(getattr(deployment, name))) for name in names}
    print(json.dumps([deployment.pool_bytes(steps.num_pages), found]))
"""


@dataclass(frozen=True)
class Compiled:
    """What was found out about some steps of a deployment."""

    device: str
    deployment: Deployment
    pool_bytes: int
    steps: dict[str, StepFindings]


@pytest.fixture(scope="module", params=["v5e", "h200"])
def compiled(request: pytest.FixtureRequest) -> list[Compiled]:
    """A Llama and a Gemma on one kind of device. Both are compiled in one process, which starts once."""
    device = str(request.param)
    jobs = [
        ((LLAMA_STEP[device],), deployment("Llama-3.1-8B", device, **LLAMA)),
        ((GEMMA_STEP[device],), deployment(GEMMA, device, mesh=GEMMA_MESHES[device], **GEMMA_LIMITS)),
    ]
    lines = "\n".join(json.dumps([names, job.to_json()]) for names, job in jobs)
    done = run_python("-c", COMPILE, input=lines, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()[-len(jobs) :]]
    return [
        Compiled(device, job, pool_bytes, {name: StepFindings.from_dict(step) for name, step in steps.items()})
        for (_, job), (pool_bytes, steps) in zip(jobs, answers, strict=True)
    ]


@pytest.mark.slow
def test_llama_8b_on_eight(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    llama, _ = compiled
    share, pool_bytes = llama.deployment.share, llama.pool_bytes
    [(name, step)] = llama.steps.items()
    findings = Findings(step, step, pool_bytes, versions={})
    monkeypatch.setattr(capacity_plan, "compile_in_child", lambda _: findings)
    planned = make_plan(Question("Llama-3.1-8B", llama.deployment, 0.9, 4096, 2048))
    assert isinstance(planned, CapacityPlan)
    assert planned.fits
    assert planned.memory.weights == share.weight_bytes
    assert name == LLAMA_STEP[llama.device]
    assert step.step_bytes - spare_bytes(llama.device) < share.smallest_matrix_bytes < pool_bytes // 1000
    # Nor is there a copy in a TPU's VMEM, which temporaries do not count. The largest array there is one of logits:
    # 64 tokens over a device's eighth of the vocabulary, 3.9 MiB.
    assert step.vmem_array_bytes < share.smallest_matrix_bytes
    # What goes in is what the planner counts; the compiler adds a little to align. After a step with prompts another
    # program samples, and it alone reads the LM head.
    lm_head = 0 if name == "decode" else 128256 * 4096 * 2 // 8
    counted = share.weight_bytes - lm_head + planned.memory.state + pool_bytes
    assert 0 <= step.argument_bytes - counted < 2 * 2**20
    always = [(c.kind, c.count, c.num_bytes) for c in step.collectives if not c.conditional]
    reduced = ("all-reduce", 2 * 32 + 1, step.num_tokens * 4096 * 2)  # two a layer and the embedding's, in bfloat16
    best = ("all-gather", 1, 8 * 2 * step.num_rows * 4)  # the best token of each device, where a step samples
    assert always == [reduced, *([best] if name == "decode" else [])]
    assert step.seconds < 120


@pytest.mark.slow
def test_layers_in_periods_copy_nothing(compiled: list[Compiled]) -> None:
    _, gemma = compiled
    smallest = gemma.deployment.share.smallest_matrix_bytes
    [step] = gemma.steps.values()
    assert step.step_bytes - spare_bytes(gemma.device) < smallest
    assert step.vmem_array_bytes < smallest


@pytest.mark.slow
def test_a_step_without_room_does_not_fit() -> None:
    # The weights take 6 of 15.75 GiB, and activations of so many tokens 59: XLA:TPU compiles no such program.
    # Requests are short, because slots for long ones would already leave no room for pages.
    flags = ["--max-num-batched-tokens", "20000", "--max-num-seqs", "20000", "--max-model-len", "1024"]
    done = run_python("-m", "jaxvllm", "plan", "--model", "Llama-3.2-3B", "--device", "v5e", *flags)
    assert done.returncode == 1
    assert "finds no room for a step: RESOURCE_EXHAUSTED" in done.stdout
    assert "about 1x2 of v5e would hold it" in done.stderr
    assert "lower max_num_batched_tokens" in done.stderr
