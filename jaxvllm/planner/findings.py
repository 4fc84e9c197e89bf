"""What a compiler says about a step; crosses the pipe from `jaxvllm.planner.worker` as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from jaxvllm.planner.collectives import Collective


@dataclass(frozen=True)
class StepFindings:
    """One compiled step, on each device."""

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
    """The largest step, and the largest of decoding alone; the page pool that they were compiled with."""

    largest: StepFindings
    decode: StepFindings
    pool_bytes: int  # on each device
    versions: dict[str, str]  # of jax and the compiler


@dataclass(frozen=True)
class Refusal:
    """Why there are no findings, in one line. usage: what was asked for cannot be; memory: there is no room."""

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
