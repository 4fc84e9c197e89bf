"""Token masks: which tokens a row may sample next, as bits that the host works out while the device runs.

Bit i of a row's words (the lowest of a word first) says whether token i is allowed. Grammar libraries fill this form.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.runtime.slot_fields import DeviceState, Rows, SlotField, SlotSizes
from jaxvllm.runtime.stages import Share, Stage

BITS = 32
# Rows that one `store_masks` call brings in: 150 KiB with 152k tokens of vocabulary.
MASK_BATCH = 8


def mask_words(vocab_size: int) -> int:
    """Words of a row's bits."""
    return -(-vocab_size // BITS)


IS_MASKED = SlotField("is_masked", np.int32, 0, lambda admission: 0)
MASK = SlotField("mask", np.int32, 0, None, lambda sizes: (mask_words(sizes.vocab_size),))


def pack_masks(rows: Sequence[tuple[int, NDArray[np.int32]]], sizes: SlotSizes) -> NDArray[np.int32]:
    """i32[MASK_BATCH, 1 + words] for `store_masks`: a slot, and the bits of its mask.

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
    """Stores the masks of some slots (`pack_masks`). They hold until the slot's next mask or next tenant."""
    slots = packed[:, 0]
    return state | {
        IS_MASKED.name: state[IS_MASKED.name].at[slots].set(1, mode="drop"),
        MASK.name: state[MASK.name].at[slots].set(packed[:, 1:], mode="drop"),
    }


def _mask_logits(logits: jax.Array, rows: Rows, positions: jax.Array, share: Share) -> jax.Array:
    token_ids = share.first + jnp.arange(share.size)
    # Only padding of the last device's share is beyond the vocabulary, and it is never sampled anyhow.
    words = jnp.take(rows[MASK.name], token_ids // BITS, axis=1, mode="clip")
    is_allowed = (words >> (token_ids % BITS)) & 1
    return jnp.where((rows[IS_MASKED.name] == 0)[:, None] | (is_allowed == 1), logits, -jnp.inf)


TOKEN_MASK = Stage((IS_MASKED, MASK), lambda rows, positions: rows[IS_MASKED.name] != 0, _mask_logits)
