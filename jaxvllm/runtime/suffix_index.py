"""The suffix index: finds where any slot has had the last few tokens of a row, so that the row may go on as that did.

The history of a slot stays when its tenant has ended, until the next tenants' tokens have replaced it. So the histories
are the texts that are remembered, and the index only says where to look: one table, whose entries are found by the hash
of the last 2, 4 and 8 tokens. An entry may be stale, or another hash's. So whoever uses one compares the tokens.
"""

import math

import jax
import jax.numpy as jnp

from jaxvllm.runtime.slot_fields import HISTORY, DeviceState, SlotSizes

INDEX = "suffix_index"
# How many tokens are hashed. Few find something nearly always, and many find what is right.
NGRAMS = (2, 4, 8)
# 16 MiB. Where the histories have more n-grams than the table has entries, newer ones replace older ones.
MOST_ENTRIES = 2**22


def new_index(sizes: SlotSizes) -> DeviceState:
    """Returns the index of empty histories, with an entry for every n-gram of these at most."""
    num_ngrams = len(NGRAMS) * sizes.num_slots * sizes.max_tokens
    return {INDEX: jnp.zeros(min(2 ** math.ceil(math.log2(num_ngrams)), MOST_ENTRIES), jnp.int32)}


def record(state: DeviceState, slots: jax.Array, positions: jax.Array, tokens: jax.Array) -> DeviceState:
    """Stores `tokens` at `positions` of `slots`, in the histories and in the index where there is one.

    All three are i32 and broadcast to each other. What is past all slots or positions is dropped. A token is entered
    under the tokens before it in its slot, so these must be there.
    """
    history = state[HISTORY.name].at[slots, positions].set(tokens, mode="drop")
    state = state | {HISTORY.name: history}
    if INDEX not in state:
        return state
    num_rows, most = history.shape
    slots, positions = (x.ravel() for x in jnp.broadcast_arrays(slots, positions))
    table, lengths = state[INDEX], jnp.array(NGRAMS)
    is_entered = ((slots < num_rows) & (positions < most))[:, None] & (positions[:, None] >= lengths)
    at = jnp.where(is_entered, _hashes(tokens_before(history, slots, positions, max(NGRAMS)), len(table)), len(table))
    # Of several with the same hash the largest stays: any other rule would leave it to chance, and then the devices of
    # a mesh would not have the same drafts.
    places = (slots * most + positions)[:, None]
    return state | {INDEX: table.at[at].set(0, mode="drop").at[at].max(places, mode="drop")}


def places_behind(state: DeviceState, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns where the last tokens of rows with `lengths` i32[R] tokens may have occurred before, and what followed.

    tokens: i32[R, 8 or more], the last one first
    Returns for each row and each of NGRAMS the slot and the position, i32[R, N], and bool[R, N]: whether there is one.
    """
    table, most = state[INDEX], state[HISTORY.name].shape[1]
    entries = table[_hashes(tokens, len(table))]
    return entries // most, entries % most, (entries > 0) & (lengths[:, None] >= jnp.array(NGRAMS))


def tokens_before(history: jax.Array, slots: jax.Array, positions: jax.Array, count: int) -> jax.Array:
    """Returns the `count` tokens before `positions` i32[...] of `slots` i32[...], the last one first: i32[..., count].

    Where a slot has not so many before it, the others are any.
    """
    before = positions[..., None] - 1 - jnp.arange(count)
    return history.at[slots[..., None], jnp.maximum(before, 0)].get(mode="clip")


def _hashes(tokens: jax.Array, num_entries: int) -> jax.Array:
    """Hashes the first tokens of i32[R, 8 or more], as many as each of NGRAMS says: i32[R, N], below a power of two."""
    hashed, found = jnp.full(len(tokens), 0x811C9DC5, jnp.uint32), []
    for number in range(max(NGRAMS)):
        hashed = (hashed ^ tokens[:, number].astype(jnp.uint32)) * jnp.uint32(0x01000193)  # FNV-1a, a token at a time
        hashed ^= hashed >> 15
        if number + 1 in NGRAMS:
            found.append(hashed)
    return (jnp.stack(found, axis=1) & (num_entries - 1)).astype(jnp.int32)
