"""The log-probabilities of prompts: each token's, from the hidden state before it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxvllm.core.plan import NOT_SCORED
from jaxvllm.runtime.batch import Batch
from jaxvllm.runtime.sampler import DeviceLogprobs, token_logprobs
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import ALONE, ModelAxis

# Tokens whose logits are there at once: 64 MiB with 128k tokens of vocabulary. Fewer read the LM head more often.
MAX_CHUNK = 128


def score(
    hidden: jax.Array,
    batch: Batch,
    rows: RaggedRows,
    project: Callable[[jax.Array], jax.Array],
    vocab_size: int,
    axis: ModelAxis = ALONE,
) -> DeviceLogprobs:
    """Of each token of a row that is scored, the log-probabilities of the token behind it, [T].

    hidden  # [T, E]
    project: [N, E] -> this device's share of the logits, f32[N, V]
    Means nothing at other tokens; zeros, and nothing is computed, when no row is scored.
    """
    num_tokens = len(hidden)
    width = min(MAX_CHUNK, num_tokens)
    ends = jnp.where(batch.lengths > 0, rows.query_starts[1:] - 1, num_tokens)
    targets = jnp.roll(batch.token_ids, -1).at[ends].set(jnp.maximum(batch.next_tokens, 0), mode="drop")

    def compute() -> DeviceLogprobs:
        def chunks(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, -num_tokens % width), *((0, 0),) * (x.ndim - 1)))
            return padded.reshape(-1, width, *x.shape[1:])

        def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> DeviceLogprobs:
            return token_logprobs(project(chunk[0]), chunk[1], vocab_size, axis)

        scores = jax.lax.map(score_chunk, (chunks(hidden), chunks(targets)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], scores)

    with jax.named_scope("prompt_scores"):
        return jax.lax.cond(
            jnp.any(batch.next_tokens != NOT_SCORED), compute, lambda: DeviceLogprobs.zeros(num_tokens, vocab_size)
        )
