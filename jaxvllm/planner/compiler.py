"""Compiles the steps of a deployment in a child process, so that a compiler's fatal error becomes a message.

`jaxvllm.planner.compile_worker` sends its findings through a pipe as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.hlo import Collective


@dataclass(frozen=True)
class StepFindings:
    """The facts of one compiled step, for each device."""

    num_tokens: int
    num_rows: int
    seconds: float  # tracing, lowering and compiling, on the machine that planned
    argument_bytes: int  # weights, pages and state
    step_bytes: int  # beyond arguments: `runtime.memory.step_bytes`
    temp_bytes: int  # of those, temporaries; the rest are outputs
    vmem_array_bytes: int  # of the largest array that a TPU's program keeps in VMEM; 0 on other devices
    collectives: tuple[Collective, ...]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"collectives": tuple(Collective(**each) for each in fields["collectives"])})


@dataclass(frozen=True)
class Findings:
    """The largest step and the largest decode step, and the page pool that they were compiled with."""

    largest: StepFindings
    decode: StepFindings
    pool_bytes: int  # on each device
    versions: dict[str, str]  # of jax and the compiler


@dataclass(frozen=True)
class Refusal:
    """The reason why there are no findings, in one line.

    The kind is `usage` when the request itself is impossible, and `memory` when there is no room.
    """

    kind: Literal["usage", "memory", "compiler"]
    message: str


def to_json(outcome: Findings | Refusal) -> str:
    return json.dumps({type(outcome).__name__: asdict(outcome)})


def from_json(text: str) -> Findings | Refusal:
    [(name, fields)] = json.loads(text).items()
    if name == Refusal.__name__:
        return Refusal(**fields)
    steps = {step: StepFindings.from_dict(fields[step]) for step in ("largest", "decode")}
    return Findings(**fields | steps)


def compile_in_child(deployment: Deployment) -> Findings | Refusal:
    """Compiles the steps in a process of their own, which a compiler's fatal error may end, and returns the outcome."""
    # On this platform jax looks for no accelerator, and makes as many virtual devices as the deployment needs.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(deployment.compiled_mesh.num_devices),
    }
    done = subprocess.run(
        [sys.executable, "-m", "jaxvllm.planner.compile_worker"],
        input=deployment.to_json(),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode == 0:
        return from_json(done.stdout)
    code = done.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = words[-1] if words else "no message"
    return Refusal("compiler", f"the compiler ended its process, {how}: {last}")
