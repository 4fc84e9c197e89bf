"""Computes the log-probability of each prompt token from the hidden state of the token before it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxvllm.core.step_plan import NOT_SCORED
from jaxvllm.runtime.batch import Batch
from jaxvllm.runtime.sampler import DEFAULT_OPTIONS, DeviceLogprobs, SamplerOptions, token_logprobs
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import ALONE, ModelAxis

# The number of tokens whose logits exist at once: 64 MiB with a vocabulary of 128k. With fewer, the LM head is read
# more often.
MAX_CHUNK = 128


@partial(jax.tree_util.register_dataclass, data_fields=["best", "hidden", "choices"], meta_fields=[])
@dataclass(frozen=True)
class PromptScores:
    """The values that `step.forward` leaves of its T tokens, for readouts and for prompts that are scored."""

    best: DeviceLogprobs  # [T], of the token after each, where few are wanted
    hidden: (
        jax.Array | None
    )  # f[T, ..], which the LM head reads, from which others get more; None: in this engine nobody may read them
    choices: jax.Array | None  # [T, layers with experts, k]: the experts that each has chosen; None: nobody is told


def is_scored(batch: Batch) -> jax.Array:
    """Returns bool[R]: whose tokens `score` scores."""
    return batch.next_tokens != NOT_SCORED


def score(
    hidden: jax.Array,
    batch: Batch,
    rows: RaggedRows,
    project: Callable[[jax.Array], jax.Array],
    vocab_size: int,
    axis: ModelAxis = ALONE,
    options: SamplerOptions = DEFAULT_OPTIONS,
) -> DeviceLogprobs:
    """Returns, for each token of a scored row, the log-probabilities (or logits) of the token after it, [T].

    hidden  # [T, ..], all that the LM head reads
    project: [N, ..] -> this device's share of the logits, f32[N, V]
    The values at other tokens are meaningless. When no row is scored, it computes nothing and returns zeros.
    """
    num_tokens = len(hidden)
    size = min(MAX_CHUNK, num_tokens)
    ends = jnp.where(batch.lengths > 0, rows.query_starts[1:] - 1, num_tokens)
    targets = jnp.roll(batch.token_ids, -1).at[ends].set(jnp.maximum(batch.next_tokens, 0), mode="drop")

    def compute() -> DeviceLogprobs:
        def chunks(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, -num_tokens % size), *((0, 0),) * (x.ndim - 1)))
            return padded.reshape(-1, size, *x.shape[1:])

        def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> DeviceLogprobs:
            return token_logprobs(project(chunk[0]), chunk[1], vocab_size, axis, options)

        scores = jax.lax.map(score_chunk, (chunks(hidden), chunks(targets)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], scores)

    with jax.named_scope("prompt_scores"):
        return jax.lax.cond(jnp.any(is_scored(batch)), compute, lambda: DeviceLogprobs.zeros(num_tokens, vocab_size))
