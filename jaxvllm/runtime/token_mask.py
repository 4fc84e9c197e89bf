"""Token masks: which tokens a row may sample next, as bits that the host works out while the device runs.

Bit i of a row's words (the lowest of a word first) says whether token i is allowed. Grammar libraries fill this form.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jaxvllm.runtime.logit_rules import LogitRule, VocabShare
from jaxvllm.runtime.slot_fields import DeviceState, SlotField, SlotSizes

BITS = 32
# Rows that one `store_masks` call brings in, so that most steps make one call: 600 KiB with 152k tokens of vocabulary.
MASK_BATCH = 32


def mask_words(vocab_size: int) -> int:
    """Returns the number of words that the bits of a row take."""
    return -(-vocab_size // BITS)


IS_MASKED = SlotField("is_masked", np.int32, 0, lambda admission: 0, is_changed=True)
MASK = SlotField("mask", np.int32, 0, None, lambda sizes: (mask_words(sizes.vocab_size),))


def pack_masks(rows: Sequence[tuple[int, NDArray[np.int32]]], sizes: SlotSizes) -> NDArray[np.int32]:
    """Returns i32[MASK_BATCH, 1 + words] for `store_masks`: a slot, and the bits of its mask.

    Unused rows go to no slot.
    """
    assert len(rows) <= MASK_BATCH
    packed = np.zeros((MASK_BATCH, 1 + mask_words(sizes.vocab_size)), np.int32)
    packed[:, 0] = sizes.num_slots + 1  # past the trash slot, so dropped
    for words, (slot, mask) in zip(packed, rows, strict=False):
        words[0] = slot
        words[1:] = mask
    return packed


def store_masks(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Stores the masks of some slots (`pack_masks`). They hold for the slot's next token."""
    slots = packed[:, 0]
    return state | {
        IS_MASKED.name: state[IS_MASKED.name].at[slots].set(1, mode="drop"),
        MASK.name: state[MASK.name].at[slots].set(packed[:, 1:], mode="drop"),
    }


def pack_bits(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns i32[words]: the bits of `token_ids`, which are in no order, as far as the largest of them."""
    bits = np.zeros(mask_words(int(token_ids.max(initial=-1)) + 1) * BITS, np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def unpack_bits(words: jax.Array, share: VocabShare) -> jax.Array:
    """Returns bool[R, columns of `share`] of i32[R, words], without a gather.

    A device unpacks only the words of its share.
    """
    if share.axis.size == 1:
        return _unpack(words)[:, : share.size]
    # A share may begin and end within a word.
    count = mask_words(share.size) + 1
    padded = jnp.pad(words, ((0, 0), (0, count)))
    own = lax.dynamic_slice_in_dim(padded, share.first // BITS, count, axis=1)
    return lax.dynamic_slice_in_dim(_unpack(own), share.first % BITS, share.size, axis=1)


def _unpack(words: jax.Array) -> jax.Array:
    """Returns bool[R, words * BITS] of i32[R, words]."""
    bits = (words[:, :, None] >> jnp.arange(BITS, dtype=jnp.int32)) & 1
    return bits.reshape(len(words), -1) == 1


def mask_logits(logits: jax.Array, is_masked: jax.Array, words: jax.Array, share: VocabShare) -> jax.Array:
    """Returns `logits` with -inf where a masked row (bool[R]) has not set the token's bit in i32[R, words]."""
    return jnp.where(unpack_bits(words, share) | ~is_masked[:, None], logits, -jnp.inf)


TOKEN_MASK = LogitRule(
    (IS_MASKED, MASK),
    lambda rows, positions: rows[IS_MASKED.name] != 0,
    lambda logits, rows, positions, share: mask_logits(logits, rows[IS_MASKED.name] != 0, rows[MASK.name], share),
)
