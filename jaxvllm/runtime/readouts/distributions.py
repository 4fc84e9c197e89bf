"""The values of all tokens, for rows that want more than the best few, or beams."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.readout import DISTRIBUTIONS
from jaxvllm.core.step_plan import Ints, StepPlan
from jaxvllm.models.decoder import project_logits
from jaxvllm.models.params import Params, head_of
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.readouts.readout import Forwarded, ProgramMaker, ReadProgram, Unsampled
from jaxvllm.runtime.sampler import SamplerOptions, distributions
from jaxvllm.runtime.slot_fields import DeviceState, Rows
from jaxvllm.runtime.step_model import StepModel

# Rows whose distributions one program yields: 5 MB with 152k tokens of vocabulary.
DISTRIBUTION_BATCH = 8


def pick_rows(unsampled: Unsampled, index: jax.Array) -> Unsampled:
    """Returns the rows `index` i32[N] of what `forward` has left unsampled."""
    return jax.tree.map(lambda x: x[index], unsampled)


def distribute(head: Params, state: DeviceState, unsampled: Unsampled, *, model: StepModel) -> jax.Array:
    """Returns what is reported of every token, f32[N, V], for N rows that are yet to be sampled."""
    logits = project_logits(head, model.shard, unsampled.hidden)
    rows, vocab_size = Rows(state, unsampled.slots), model.spec.vocab_size
    return distributions(logits, rows, unsampled.positions, vocab_size, model.axis, model.sampling)


@dataclass(frozen=True)
class _Program:
    """Picks some rows first, so that the second part, the large one, is the same for all buckets."""

    pick: jax.stages.Compiled
    compute: jax.stages.Compiled

    def __call__(self, state: DeviceState, left: Forwarded, index: Any) -> jax.Array:
        result: jax.Array = self.compute(left.head, state, self.pick(left.unsampled, index))
        return result


class Distributions:
    """Reports f32[V] of each row, in its units."""

    name = DISTRIBUTIONS.name

    def is_possible(self, options: SamplerOptions) -> bool:
        return True

    def is_expected(self, options: SamplerOptions) -> bool:
        return True

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        return (bucket.num_rows,)

    def compile(self, maker: ProgramMaker, bucket: Bucket) -> ReadProgram:
        index = maker.of_replicas((DISTRIBUTION_BATCH,), jnp.int32)
        pick = maker.compile_recipe(pick_rows, (maker.unsampled(bucket.num_rows), index))
        arguments = (head_of(maker.params), maker.state, maker.unsampled(DISTRIBUTION_BATCH))
        return _Program(pick, maker.compile_shared((self.name, DISTRIBUTION_BATCH), distribute, arguments))

    def calls(self, plan: StepPlan, bucket: Bucket) -> Iterable[Ints]:
        for rows in batched(np.flatnonzero(plan.readouts[self.name]), DISTRIBUTION_BATCH):
            index = np.zeros(DISTRIBUTION_BATCH, np.int32)
            index[: len(rows)] = rows
            yield index

    def report(self, plan: StepPlan, results: Sequence[jax.Array]) -> Mapping[int, NDArray[np.float32]]:
        rows = np.flatnonzero(plan.readouts[self.name]).tolist()
        return dict(zip(rows, (row for part in results for row in np.asarray(part)), strict=False))
