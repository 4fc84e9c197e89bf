"""A request's rules for single tokens: those allowed, biases, and bad words, which must not be completed."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jaxvllm.core.request import MAX_BAD_WORD_TOKENS
from jaxvllm.core.sampling_params import MAX_LOGIT_BIASES
from jaxvllm.core.slots import NO_TOKEN
from jaxvllm.core.step_plan import Admission
from jaxvllm.runtime.logit_rules import LogitRule, VocabShare
from jaxvllm.runtime.slot_fields import HISTORY, NUM_PROMPT, Rows, SlotField
from jaxvllm.runtime.token_mask import mask_logits, mask_words, pack_bits

# Columns that a scatter changes at once. Requests give a few tokens of the thousand that they may, and a scatter takes
# as long for those that they do not give.
CHUNK = 16


def _allowed_bits(admission: Admission) -> NDArray[np.int32] | None:
    allowed = admission.request.sampling_params.allowed_token_ids
    return None if allowed is None else pack_bits(np.asarray(allowed, np.int32))


def _biases(admission: Admission) -> NDArray[np.int32] | None:
    pairs = admission.request.sampling_params.logit_bias
    if not pairs:
        return None
    token_ids, values = zip(*pairs, strict=True)
    return np.stack([np.asarray(token_ids, np.int32), np.asarray(values, np.float32).view(np.int32)])


def _bad_words(admission: Admission) -> NDArray[np.int32] | None:
    """Returns i32[3, N]: the tokens of all words, and for each where its word begins and ends among them."""
    words = admission.request.bad_word_ids
    if not words:
        return None
    lengths = np.asarray([len(word) for word in words], np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    return np.stack(
        [np.asarray([*chain(*words)], np.int32), np.repeat(ends - lengths, lengths), np.repeat(ends - 1, lengths)]
    )


def _flag(name: str, asks: Callable[[Admission], Any]) -> SlotField:
    return SlotField(name, np.int32, 0, lambda admission: bool(asks(admission)))


IS_RESTRICTED = _flag("is_restricted", lambda a: a.request.sampling_params.allowed_token_ids is not None)
ALLOWED = SlotField("allowed", np.int32, 0, _allowed_bits, lambda sizes: (mask_words(sizes.vocab_size),), is_rare=True)
IS_BIASED = _flag("is_biased", lambda a: a.request.sampling_params.logit_bias)
BIASES = SlotField(  # token ids, and the bits of their biases
    "biases", np.int32, NO_TOKEN, _biases, lambda sizes: (2, MAX_LOGIT_BIASES), is_rare=True
)
HAS_BAD_WORDS = _flag("has_bad_words", lambda a: a.request.bad_word_ids)
BAD_WORDS_OF = SlotField(
    "bad_words", np.int32, NO_TOKEN, _bad_words, lambda sizes: (3, MAX_BAD_WORD_TOKENS), is_rare=True
)


def _restrict(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    return mask_logits(logits, rows[IS_RESTRICTED.name] != 0, rows[ALLOWED.name], share)


def _bias(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    token_ids, bits = jnp.moveaxis(rows[BIASES.name], 1, 0)
    token_ids = jnp.where((rows[IS_BIASED.name] != 0)[:, None], token_ids, NO_TOKEN)
    values = lax.bitcast_convert_type(bits, jnp.float32)
    return _add(logits, share.columns(token_ids), values)


def _forbid_bad_words(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Forbids the last token of each word whose other tokens end the output. The prompt has no part in it."""
    tokens, begins, ends = jnp.moveaxis(rows[BAD_WORDS_OF.name], 1, 0)
    token_ids = jnp.where((rows[HAS_BAD_WORDS.name] != 0)[:, None], tokens, NO_TOKEN)
    # How far in front of the word's last token each token is, and whether the history differs there.
    before = ends - jnp.arange(tokens.shape[1])
    at = positions[:, None] - before
    history = rows.state[HISTORY.name][rows.slots[:, None], jnp.maximum(at, 0)]
    differs = (before > 0) & ((history != tokens) | (at < rows[NUM_PROMPT.name][:, None]))
    sums = jnp.cumsum(differs, axis=1, dtype=jnp.int32)
    in_front = jnp.take_along_axis(sums, jnp.maximum(begins - 1, 0), axis=1)
    num_differing = sums - jnp.where(begins > 0, in_front, 0)
    is_next = (before == 0) & (num_differing == 0)
    return _add(logits, jnp.where(is_next, share.columns(token_ids), share.size), jnp.full(tokens.shape, -jnp.inf))


def _add(logits: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """Adds `values` [R, N] to `columns` i32[R, N] of the logits, where they exist, as far as any row has some."""
    size = logits.shape[-1]
    needed = (columns < size).any(axis=0)
    count = jnp.max(jnp.where(needed, jnp.arange(1, len(needed) + 1), 0))

    def add_chunk(index: jax.Array, logits: jax.Array) -> jax.Array:
        part = (lax.dynamic_slice_in_dim(x, index * CHUNK, CHUNK, axis=1) for x in (columns, values))
        at, more = part
        return logits.at[jnp.arange(len(logits))[:, None], at].add(more, mode="drop")

    result: jax.Array = lax.fori_loop(0, -(-count // CHUNK), add_chunk, logits)
    return result


ALLOWED_TOKENS = LogitRule((IS_RESTRICTED, ALLOWED), lambda rows, positions: rows[IS_RESTRICTED.name] != 0, _restrict)
LOGIT_BIAS = LogitRule((IS_BIASED, BIASES), lambda rows, positions: rows[IS_BIASED.name] != 0, _bias)
BAD_WORDS = LogitRule(
    (HAS_BAD_WORDS, BAD_WORDS_OF, NUM_PROMPT), lambda rows, positions: rows[HAS_BAD_WORDS.name] != 0, _forbid_bad_words
)
