"""The hidden states of prompts as vectors: of each row the last one, or the sum over its tokens.

Heads of embeddings compute in float32 (vLLM's pooler heads do), so vectors leave the device so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.readout import POOLED
from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.readouts.readout import Forwarded, ProgramMaker, ReadProgram
from jaxvllm.runtime.sampler import SamplerOptions
from jaxvllm.runtime.slot_fields import DeviceState


def last_vectors(hidden: jax.Array, num_tokens: jax.Array, *, size: int) -> jax.Array:
    """Returns the last hidden states of R rows as f32[R, E], of f[R, ..] which begin with the E = `size` of each."""
    del num_tokens  # of the rows: each is one hidden state here
    return hidden[:, :size].astype(jnp.float32)


def sum_vectors(hidden: jax.Array, num_tokens: jax.Array, *, size: int) -> jax.Array:
    """Returns the sums f32[R, E] over the hidden states of rows, which have `num_tokens` i32[R] of them.

    Each of f[T, ..] begins with the E = `size` numbers of a state. The states after those of the last row are padding.
    """
    ends = jnp.cumsum(num_tokens)[:, None]
    at = jnp.arange(len(hidden))
    is_own = (at < ends) & (at >= ends - num_tokens[:, None])
    # The sum of float32 products with 0 and 1, exact in float32 but for its order.
    states = hidden[:, :size].astype(jnp.float32)
    states = jnp.where(is_own.any(axis=0)[:, None], states, 0)  # padding may be anything, NaN too
    return jnp.matmul(is_own.astype(jnp.float32), states, precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True)
class _Program:
    compute: jax.stages.Compiled
    sums: bool

    def __call__(self, state: DeviceState, left: Forwarded, num_tokens: Any) -> jax.Array:
        result: jax.Array = self.compute(left.readable.hidden if self.sums else left.unsampled.hidden, num_tokens)
        return result


class PooledVectors:
    """Reports f32[E] of each row."""

    name = POOLED.name

    def is_possible(self, options: SamplerOptions) -> bool:
        return True

    def is_expected(self, options: SamplerOptions) -> bool:
        return options.sums_prompts

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        return bucket.num_tokens, bucket.num_rows

    def compile(self, maker: ProgramMaker, bucket: Bucket) -> ReadProgram:
        counts, sums = maker.of_replicas((bucket.num_rows,), jnp.int32), maker.sampling.sums_prompts
        run = partial(sum_vectors if sums else last_vectors, size=maker.hidden_size)
        hidden = maker.hidden(bucket.num_tokens if sums else bucket.num_rows)
        compute = maker.compile_recipe(run, (hidden, counts), is_read=True)
        return _Program(compute, sums)

    def calls(self, plan: StepPlan, bucket: Bucket) -> Iterable[Ints]:
        num_tokens = np.zeros(bucket.num_rows, np.int32)
        num_tokens[: plan.num_rows] = plan.lengths
        yield num_tokens

    def report(self, plan: StepPlan, results: Sequence[jax.Array]) -> Mapping[int, NDArray[np.float32]]:
        vectors = np.asarray(results[0])
        return {row: vectors[row] for row in np.flatnonzero(plan.readouts[self.name]).tolist()}
