"""Sampling on the device: from logits to one token a row, without sorting the vocabulary.

Randomness is counter based: the noise of a token depends on the request's seed and the token's position alone, so
a seeded request draws the same tokens in whatever batch, chunking or after whatever preemption.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.core.sampling_params import MAX_LOGPROBS
from jaxvllm.runtime.state import SamplingState
from sharding.axis import ALONE, ModelAxis


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "ranks", "top_ids", "top"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DeviceLogprobs:
    """`core.plan.TopLogprobs` on the device; zeros where nobody wants any."""

    token: jax.Array  # f32[N]
    ranks: jax.Array  # i32[N]
    top_ids: jax.Array  # i32[N, <= MAX_LOGPROBS]
    top: jax.Array  # f32[N, <= MAX_LOGPROBS]

    @classmethod
    def zeros(cls, num_rows: int, vocab_size: int) -> "DeviceLogprobs":
        """Of nobody."""
        best = (num_rows, min(MAX_LOGPROBS, vocab_size))
        return cls(
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(best, jnp.int32),
            jnp.zeros(best, jnp.float32),
        )


def sample(
    logits: jax.Array, params: SamplingState, positions: jax.Array, vocab_size: int, axis: ModelAxis = ALONE
) -> jax.Array:
    """One token per row, i32[R], for logits f32[R, V] and the position i32[R] that each token will have.

    V is this device's share of the `vocab_size` tokens; what the last device has beyond those is never sampled.
    Greedy rows take the argmax. Others divide by the temperature, drop what min_p, top_k and top_p exclude (in this
    order, as vLLM; equal logits at a threshold all stay) and draw by Gumbel-max (Maddison et al., arXiv 1411.0030).
    A batch without random rows skips all that, one without top_k and top_p the search for thresholds.
    """
    logits = _forbid_early_stops(logits, params, positions, axis)
    greedy = _argmax(logits, vocab_size, axis)

    def draw() -> jax.Array:
        rows = axis.exchange(logits)[:, :vocab_size]
        drawn = _draw(rows, *axis.own_rows((params, positions)))
        return jnp.where(params.temperature > 0, axis.all_rows(drawn, len(logits)), greedy)

    return lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy)


def logprobs(
    logits: jax.Array, token_ids: jax.Array, params: SamplingState, vocab_size: int, axis: ModelAxis = ALONE
) -> DeviceLogprobs:
    """`token_logprobs` of a step's rows, computed only if one of them asks."""
    return lax.cond(
        jnp.any(params.num_logprobs >= 0),
        lambda: token_logprobs(logits, token_ids, vocab_size, axis),
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


def _forbid_early_stops(logits: jax.Array, params: SamplingState, positions: jax.Array, axis: ModelAxis) -> jax.Array:
    early = positions < params.min_length

    def forbid(logits: jax.Array) -> jax.Array:
        share = logits.shape[-1]
        ids = params.stop_ids - axis.first(share)
        is_here = early[:, None] & (params.stop_ids >= 0) & (ids >= 0)
        ids = jnp.where(is_here, ids, share)
        return logits.at[jnp.arange(len(logits))[:, None], ids].set(-jnp.inf, mode="drop")

    return lax.cond(jnp.any(early), forbid, lambda x: x, logits)


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


def _draw(logits: jax.Array, params: SamplingState, positions: jax.Array) -> jax.Array:
    """One token per row at its temperature, among those that its filters leave."""
    scaled = logits / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    floor = scaled.max(axis=-1, keepdims=True) + jnp.log(params.min_p)[:, None]
    scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
    limited = jnp.any((params.top_k > 0) | (params.top_p < 1))
    scaled = lax.cond(limited, lambda x: _top_p(_top_k(x, params.top_k), params.top_p), lambda x: x, scaled)
    noise = jax.vmap(partial(_gumbel, size=logits.shape[-1]))(params.seed, positions)
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keeps the `top_k` i32[R] largest logits of each row (0: all)."""
    keys = _ordered(logits)
    floor = _largest_threshold(lambda t: (keys >= t[:, None]).sum(axis=-1) >= top_k, len(logits))
    return jnp.where((keys >= floor[:, None]) | (top_k == 0)[:, None], logits, -jnp.inf)


def _top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the smallest set of largest logits whose probability reaches `top_p` f32[R] (1: all)."""
    keys = _ordered(logits)
    probs = jax.nn.softmax(logits, axis=-1)

    def reaches(threshold: jax.Array) -> jax.Array:
        return jnp.where(keys >= threshold[:, None], probs, 0).sum(axis=-1) >= top_p

    floor = _largest_threshold(reaches, len(logits))
    return jnp.where((keys >= floor[:, None]) | (top_p >= 1)[:, None], logits, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the float32 values; equal values, 0.0 and -0.0 among them, have one key."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest_threshold(holds, rows: int) -> jax.Array:  # type: ignore[no-untyped-def]
    """The largest i32[R] for which the monotone `holds(i32[R]) -> bool[R]` is true, or the smallest int32.

    32 halvings over the bits of the value: exact, and 32 reads of the logits where a sort would move them.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle - 1)

    low = jnp.full(rows, jnp.iinfo(jnp.int32).min, jnp.int32)
    high = jnp.full(rows, jnp.iinfo(jnp.int32).max, jnp.int32)
    return lax.fori_loop(0, 32, halve, (low, high))[0]
