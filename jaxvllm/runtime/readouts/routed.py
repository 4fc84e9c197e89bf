"""The experts that the tokens of rows have chosen, for trainers that compute with the same ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.readout import ROUTED
from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.readouts.readout import Forwarded, ProgramMaker, ReadProgram
from jaxvllm.runtime.sampler import SamplerOptions
from jaxvllm.runtime.slot_fields import DeviceState


def read_choices(choices: jax.Array, none: jax.Array) -> jax.Array:
    """Returns the choices [T, layers, k] of a step, for the host."""
    del none  # a call of a readout has words, and this one needs none
    return choices


@dataclass(frozen=True)
class _Program:
    compute: jax.stages.Compiled

    def __call__(self, state: DeviceState, left: Forwarded, none: Any) -> jax.Array:
        result: jax.Array = self.compute(left.readable.choices, none)
        return result


class RoutedExperts:
    """Reports [T, layers, k] of all tokens of the step, those of rows that do not want it too."""

    name = ROUTED.name

    def is_possible(self, options: SamplerOptions) -> bool:
        return options.tells_experts

    def is_expected(self, options: SamplerOptions) -> bool:
        return options.tells_experts

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        return (bucket.num_tokens,)

    def compile(self, maker: ProgramMaker, bucket: Bucket) -> ReadProgram:
        arguments = maker.choices(bucket.num_tokens), maker.of_replicas((1,), jnp.int32)
        return _Program(maker.compile_recipe(read_choices, arguments, is_read=True))

    def calls(self, plan: StepPlan, bucket: Bucket) -> Iterable[Ints]:
        yield np.zeros(1, np.int32)

    def report(self, plan: StepPlan, results: Sequence[jax.Array]) -> NDArray[np.unsignedinteger[Any]]:
        [choices] = results
        return np.asarray(choices)[: plan.num_tokens]
