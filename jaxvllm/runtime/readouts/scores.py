"""The log-probabilities of the tokens of prompts, each from the hidden state of the token before it, and the best ones.

They are a program of their own, and no part of the forward pass of each bucket, which compiles in three quarters of the
time without them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.core.readout import SCORES, WIDE_SCORES, Readout, scored_tokens
from jaxvllm.core.sampling_params import MAX_LOGPROBS
from jaxvllm.core.step_plan import SCORE_BATCH, Ints, StepPlan, TopLogprobs
from jaxvllm.models.decoder import project_logits
from jaxvllm.models.params import Params, head_of
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.readouts.readout import Forwarded, ProgramMaker, ReadProgram
from jaxvllm.runtime.sampler import DeviceLogprobs, SamplerOptions, token_logprobs
from jaxvllm.runtime.slot_fields import DeviceState
from jaxvllm.runtime.step_model import StepModel

# The number of tokens whose logits exist at once: 64 MiB with a vocabulary of 128k. With fewer, the LM head is read
# more often.
FEW_BATCH = 128


def pick_tokens(hidden: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states f[N, ..] of some of T tokens, and the tokens after them, as `Scores.calls` says."""
    tokens, following = packed
    return hidden[tokens], following


def score(head: Params, hidden: jax.Array, token_ids: jax.Array, *, model: StepModel, count: int) -> DeviceLogprobs:
    """Returns the log-probabilities of `token_ids` i32[N], which follow `hidden` f[N, ..], and of the `count` best."""
    logits = project_logits(head, model.shard, hidden)
    return token_logprobs(logits, token_ids, model.spec.vocab_size, model.axis, model.sampling, count)


@dataclass(frozen=True)
class _Program:
    """Picks some tokens first, so that the second part, the large one, is the same for all buckets of many tokens."""

    pick: jax.stages.Compiled
    compute: jax.stages.Compiled

    def __call__(self, state: DeviceState, left: Forwarded, packed: Any) -> DeviceLogprobs:
        result: DeviceLogprobs = self.compute(left.head, *self.pick(left.readable.hidden, packed))
        return result


@dataclass(frozen=True)
class Scores:
    """Reports `TopLogprobs` of the tokens of rows that want them, in order."""

    readout: Readout[TopLogprobs]
    batch: int  # the most tokens of a call
    is_wide: bool = False  # as many of the best tokens as any request may want, or the best few

    @property
    def name(self) -> str:
        return self.readout.name

    def is_possible(self, options: SamplerOptions) -> bool:
        return options.has_wide_scores or not self.is_wide

    def is_expected(self, options: SamplerOptions) -> bool:
        return self.is_possible(options)

    def sizes(self, bucket: Bucket) -> tuple[int, ...]:
        return (bucket.num_tokens,)

    def compile(self, maker: ProgramMaker, bucket: Bucket) -> ReadProgram:
        size = self._size(bucket)
        pick = maker.compile_recipe(
            pick_tokens, (maker.hidden(bucket.num_tokens), maker.of_replicas((2, size), jnp.int32))
        )
        run = partial(score, count=maker.sampling.max_logprobs if self.is_wide else MAX_LOGPROBS)
        arguments = head_of(maker.params), maker.hidden(size), maker.of_replicas((size,), jnp.int32)
        return _Program(pick, maker.compile_shared((self.name, size), run, arguments))

    def calls(self, plan: StepPlan, bucket: Bucket) -> Iterable[Ints]:
        """Returns i32[2, N] for each call: the numbers of tokens in the step, and the tokens after them."""
        tokens, size = scored_tokens(plan, self.readout), self._size(bucket)
        for first in range(0, tokens.shape[1], size):
            some = tokens[:, first : first + size]
            yield np.pad(some, ((0, 0), (0, size - some.shape[1])))

    def report(self, plan: StepPlan, results: Sequence[DeviceLogprobs]) -> TopLogprobs:
        count = int(plan.lengths @ plan.readouts[self.name])
        whole = jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts])[:count], *results)
        return TopLogprobs(whole.token, whole.ranks, whole.top_ids, whole.top)

    def _size(self, bucket: Bucket) -> int:
        return min(self.batch, bucket.num_tokens)


FEW = Scores(SCORES, FEW_BATCH)
WIDE = Scores(WIDE_SCORES, SCORE_BATCH, is_wide=True)
