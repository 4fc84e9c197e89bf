"""Sampling on the device: from logits to one token a row, without sorting the vocabulary.

Randomness is counter based: the noise of a token depends on the request's seed and the token's position alone, so
a seeded request draws the same tokens in whatever batch, chunking or after whatever preemption.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.core.sampling_params import MAX_LOGPROBS
from jaxvllm.runtime.slot_fields import Rows
from jaxvllm.runtime.stages import MIN_P, MIN_TOKENS, TOP_K, TOP_P, Share, run_stages
from jaxvllm.runtime.token_mask import TOKEN_MASK
from sharding.axis import ALONE, ModelAxis

# In vLLM's order. The first change every row's logits, greedy ones too, each device those of its share of the
# vocabulary; the others see a random row's logits whole, divided by its temperature.
LOGIT_STAGES = (TOKEN_MASK, MIN_TOKENS)
FILTER_STAGES = (MIN_P, TOP_K, TOP_P)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "ranks", "top_ids", "top"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DeviceLogprobs:
    """`core.step_plan.TopLogprobs` on the device; zeros where nobody wants any."""

    token: jax.Array  # f32[N]
    ranks: jax.Array  # i32[N]
    top_ids: jax.Array  # i32[N, <= MAX_LOGPROBS]
    top: jax.Array  # f32[N, <= MAX_LOGPROBS]

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int) -> "DeviceLogprobs":
        """Returns log-probabilities for rows that want none."""
        best = (num_rows, min(MAX_LOGPROBS, vocab_size))
        return cls(
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(best, jnp.int32),
            jnp.zeros(best, jnp.float32),
        )


def sample(
    logits: jax.Array,
    rows: Rows,
    positions: jax.Array,
    vocab_size: int,
    axis: ModelAxis = ALONE,
) -> jax.Array:
    """One token per row, i32[R], for logits f32[R, V] and the position i32[R] that each token will have.

    V is this device's share of the `vocab_size` tokens; what the last device has beyond those is never sampled.
    All rows go through `LOGIT_STAGES`. Greedy rows then take the argmax; others divide by the temperature, go through
    `FILTER_STAGES` (equal logits at a threshold all stay) and draw by Gumbel-max (Maddison et al., arXiv 1411.0030).
    A batch without random rows skips all that.
    """
    share = Share(axis.first(logits.shape[-1]), logits.shape[-1])
    logits = run_stages(LOGIT_STAGES, logits, rows, positions, share)
    greedy = _argmax(logits, vocab_size, axis)

    def draw() -> jax.Array:
        whole = axis.exchange(logits)[:, :vocab_size]
        own = replace(rows, slots=axis.own_rows(rows.slots))
        drawn = _draw(whole, own, axis.own_rows(positions))
        return jnp.where(rows["temperature"] > 0, axis.all_rows(drawn, len(logits)), greedy)

    return lax.cond(jnp.any(rows["temperature"] > 0), draw, lambda: greedy)


def logprobs(
    logits: jax.Array, token_ids: jax.Array, rows: Rows, vocab_size: int, axis: ModelAxis = ALONE
) -> DeviceLogprobs:
    """`token_logprobs` of a step's rows, computed only if one of them asks."""
    return lax.cond(
        jnp.any(rows["num_logprobs"] >= 0),
        lambda: token_logprobs(logits / rows["logit_divisor"][:, None], token_ids, vocab_size, axis),
        lambda: DeviceLogprobs.zeros(len(logits), vocab_size),
    )


def token_logprobs(logits: jax.Array, token_ids: jax.Array, vocab_size: int, axis: ModelAxis = ALONE) -> DeviceLogprobs:
    """Log-probabilities of the unmodified distribution, as vLLM reports by default, of `token_ids` and of the best."""
    values = jax.nn.log_softmax(axis.exchange(logits)[:, :vocab_size], axis=-1)
    token = jnp.take_along_axis(values, axis.own_rows(token_ids)[:, None], axis=-1)
    top, top_ids = lax.top_k(values, min(MAX_LOGPROBS, vocab_size))
    ranks = (values >= token).sum(axis=-1, dtype=jnp.int32)
    own = DeviceLogprobs(token[:, 0], ranks, top_ids.astype(jnp.int32), top)
    return axis.all_rows(own, len(logits))


def _argmax(logits: jax.Array, vocab_size: int, axis: ModelAxis) -> jax.Array:
    """i32[R]: the first of the largest logits, over all devices."""
    if axis.size == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    share = logits.shape[-1]
    first = axis.first(share)
    if share * axis.size > vocab_size:
        logits = jnp.where(first + jnp.arange(share) < vocab_size, logits, -jnp.inf)
    # The best of each device and its token, as the bits of one array: one collective.
    best = lax.bitcast_convert_type(logits.max(axis=-1), jnp.int32)
    tokens = first + jnp.argmax(logits, axis=-1).astype(jnp.int32)
    all_best, all_tokens = jnp.moveaxis(axis.stack(jnp.stack([best, tokens])), 1, 0)
    winner = jnp.argmax(lax.bitcast_convert_type(all_best, jnp.float32), axis=0)
    return jnp.take_along_axis(all_tokens, winner[None], axis=0)[0]


def _draw(logits: jax.Array, rows: Rows, positions: jax.Array) -> jax.Array:
    """One token per row at its temperature, among those that its filters leave."""
    temperature = rows["temperature"]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    scaled = run_stages(FILTER_STAGES, scaled, rows, positions, Share(0, logits.shape[-1]))
    noise = jax.vmap(partial(_gumbel, size=logits.shape[-1]))(rows["seed"], positions)
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
