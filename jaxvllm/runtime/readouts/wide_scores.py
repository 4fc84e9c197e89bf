"""The log-probabilities of the tokens of prompts, and of more of the best tokens than each step yields."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.readout import WIDE_SCORES, wide_tokens
from jaxvllm.core.step_plan import SCORE_BATCH, Ints, StepPlan, TopLogprobs
from jaxvllm.models.decoder import project_logits
from jaxvllm.models.params import Params, head_of
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.readouts.readout import Forwarded, ProgramMaker, ReadProgram
from jaxvllm.runtime.sampler import DeviceLogprobs, SamplerOptions, token_logprobs
from jaxvllm.runtime.slot_fields import DeviceState
from jaxvllm.runtime.step_model import StepModel


def pick_tokens(hidden: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states f[SCORE_BATCH, ..] of some of T tokens, and the next tokens, as `pack_wide` says."""
    tokens, following = packed
    return hidden[tokens], following


def score_widely(head: Params, hidden: jax.Array, token_ids: jax.Array, *, model: StepModel) -> DeviceLogprobs:
    """Returns the log-probabilities of `token_ids` i32[N], which follow `hidden` f[N, ..], and of the best tokens.

    There are as many best tokens as any request may want.
    """
    logits = project_logits(head, model.shard, hidden)
    count = model.sampling.max_logprobs
    return token_logprobs(logits, token_ids, model.spec.vocab_size, model.axis, model.sampling, count)


def pack_wide(plan: StepPlan) -> NDArray[np.int32]:
    """Returns i32[2, SCORE_BATCH] for `pick_tokens`: tokens of `plan` to be scored widely, and the next ones."""
    packed = np.zeros((2, SCORE_BATCH), np.int32)
    tokens = wide_tokens(plan)
    packed[:, : tokens.shape[1]] = tokens
    return packed


@dataclass(frozen=True)
class _Program:
    """Picks some tokens first, so that the second part, the large one, is the same for all buckets."""

    pick: jax.stages.Compiled
    compute: jax.stages.Compiled

    def __call__(self, state: DeviceState, left: Forwarded, packed: Any) -> DeviceLogprobs:
        result: DeviceLogprobs = self.compute(left.head, *self.pick(left.scores.hidden, packed))
        return result


class WideScores:
    """Reports `TopLogprobs` of the tokens of rows that want them, SCORE_BATCH at most, in order."""

    name = WIDE_SCORES.name

    def is_possible(self, options: SamplerOptions) -> bool:
        return options.has_wide_scores

    def is_expected(self, options: SamplerOptions) -> bool:
        return options.has_wide_scores

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        return (bucket.num_tokens,)

    def compile(self, maker: ProgramMaker, bucket: Bucket) -> ReadProgram:
        packed = maker.of_replicas((2, SCORE_BATCH), jnp.int32)
        pick = maker.compile_recipe(pick_tokens, (maker.hidden(bucket.num_tokens), packed))
        token_ids = maker.of_replicas((SCORE_BATCH,), jnp.int32)
        arguments = (head_of(maker.params), maker.hidden(SCORE_BATCH), token_ids)
        return _Program(pick, maker.compile_shared(score_widely, arguments))

    def calls(self, plan: StepPlan, bucket: Bucket) -> Iterable[Ints]:
        yield pack_wide(plan)

    def report(self, plan: StepPlan, results: Sequence[DeviceLogprobs]) -> TopLogprobs:
        [scores] = results
        count = int(plan.lengths @ plan.readouts[self.name])
        device = jax.tree.map(lambda x: np.asarray(x)[:count], scores)
        return TopLogprobs(device.token, device.ranks, device.top_ids, device.top)
