"""Logit rules: what sampling parameters do to a row's logits before a token is taken, one small value each.

A rule that no row of a batch asks for is skipped while the step runs (`lax.cond`). `sampler.py` has their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvllm.runtime.slot_fields import LATE_IDS, MIN_LENGTH, Rows, SlotField
from sharding.axis import ALONE, ModelAxis


@dataclass(frozen=True)
class VocabShare:
    """The columns of the vocabulary that some logits have. The last of several shares may go beyond the vocabulary."""

    size: int
    vocab_size: int
    axis: ModelAxis = ALONE  # alone: the share is all

    @property
    def first(self) -> jax.Array | int:
        return self.axis.first(self.size)

    def columns(self, token_ids: jax.Array) -> jax.Array:
        """Returns where `token_ids` are in this share; `size`, which a scatter drops, where they are not."""
        columns = token_ids - self.first
        return jnp.where((token_ids >= 0) & (columns >= 0), columns, self.size)

    def take(self, values: jax.Array) -> jax.Array:
        """Returns the columns of this share, [R, size], of values [R, vocab_size or more]."""
        if self.axis.size == 1:
            return values[:, : self.size]
        missing = max(self.size * self.axis.size - values.shape[1], 0)
        return lax.dynamic_slice_in_dim(jnp.pad(values, ((0, 0), (0, missing))), self.first, self.size, axis=1)

    def is_empty(self, logits: jax.Array) -> jax.Array:
        """Returns bool[R]: rows in which no token of the whole vocabulary is possible."""
        is_token = self.first + jnp.arange(self.size) < self.vocab_size
        return self.axis.sum(((logits > -jnp.inf) & is_token).any(axis=1).astype(jnp.int32)) == 0


@dataclass(frozen=True)
class LogitRule:
    """A pure function on logits f32[R, V], with the slot fields that it reads.

    asks: (rows, positions i32[R]) -> bool[R], the rows that the rule changes
    apply: (logits, rows, positions, share) -> logits; leaves rows that do not ask as they are
    The position is the one that the token will have.
    """

    fields: tuple[SlotField, ...]
    asks: Callable[[Rows, jax.Array], jax.Array]
    apply: Callable[[jax.Array, Rows, jax.Array, VocabShare], jax.Array]


def run_rules(
    rules: Sequence[LogitRule], logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare
) -> jax.Array:
    """Returns what `rules`, in order, make of `logits`.

    Where no row asks for any of them, that is one branch not taken.
    """
    asked = [jnp.any(rule.asks(rows, positions)) for rule in rules]

    def run(logits: jax.Array) -> jax.Array:
        for rule, is_asked in zip(rules, asked, strict=True):
            logits = lax.cond(
                is_asked, lambda x, apply=rule.apply: apply(x, rows, positions, share), lambda x: x, logits
            )
        return logits

    return lax.cond(jnp.any(jnp.stack(asked)), run, lambda x: x, logits)


def _forbid_stops(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Forbids stop ids in rows that are too short to end, unless masks have left a row nothing else."""
    early = positions < rows["min_length"]
    columns = jnp.where(early[:, None], share.columns(rows["late_ids"]), share.size)
    without = logits.at[jnp.arange(len(logits))[:, None], columns].set(-jnp.inf, mode="drop")
    return jnp.where(share.is_empty(without)[:, None], logits, without)


def _min_p(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Keeps tokens at least `min_p` times as probable as the best."""
    floor = logits.max(axis=-1, keepdims=True) + jnp.log(rows["min_p"])[:, None]
    return jnp.where(logits >= floor, logits, -jnp.inf)


def _top_k(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Keeps the `top_k` largest logits of each row (0: all)."""
    top_k = rows["top_k"]
    keys = _ordered(logits)
    floor = _largest_threshold(lambda t: (keys >= t[:, None]).sum(axis=-1) >= top_k, len(logits))
    return jnp.where((keys >= floor[:, None]) | (top_k == 0)[:, None], logits, -jnp.inf)


def _top_p(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Keeps the smallest set of largest logits whose probability reaches `top_p` (1: all)."""
    top_p = rows["top_p"]
    keys = _ordered(logits)
    probs = jax.nn.softmax(logits, axis=-1)

    def reaches(threshold: jax.Array) -> jax.Array:
        return jnp.where(keys >= threshold[:, None], probs, 0).sum(axis=-1) >= top_p

    floor = _largest_threshold(reaches, len(logits))
    return jnp.where((keys >= floor[:, None]) | (top_p >= 1)[:, None], logits, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Returns int32 keys in the order of the float32 values. Equal values, 0.0 and -0.0 among them, have one key."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest_threshold(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Returns the largest i32[R] for which the monotone `holds(i32[R]) -> bool[R]` is true, or the smallest int32.

    It halves the range 32 times over the bits of the value. This is exact, and reads the logits 32 times where a sort
    would move them.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle - 1)

    low = jnp.full(rows, jnp.iinfo(jnp.int32).min, jnp.int32)
    high = jnp.full(rows, jnp.iinfo(jnp.int32).max, jnp.int32)
    bounds: tuple[jax.Array, jax.Array] = lax.fori_loop(0, 32, halve, (low, high))
    return bounds[0]


MIN_TOKENS = LogitRule((MIN_LENGTH, LATE_IDS), lambda rows, positions: positions < rows["min_length"], _forbid_stops)
MIN_P = LogitRule(
    (SlotField("min_p", np.float32, 0, lambda a: a.request.sampling_params.min_p),),
    lambda rows, positions: rows["min_p"] > 0,
    _min_p,
)
TOP_K = LogitRule(
    (SlotField("top_k", np.int32, 0, lambda a: max(a.request.sampling_params.top_k, 0)),),
    lambda rows, positions: rows["top_k"] > 0,
    _top_k,
)
TOP_P = LogitRule(
    (SlotField("top_p", np.float32, 1, lambda a: a.request.sampling_params.top_p),),
    lambda rows, positions: rows["top_p"] < 1,
    _top_p,
)
