"""Penalties for tokens that a row has already: repetition, frequency and presence.

A slot counts the tokens of its output, one element a sampled token, and knows which tokens its prompt has. Counting
again from the history in every step would be a scatter of all rows' tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.step_plan import Admission
from jaxvllm.runtime.logit_rules import LogitRule, VocabShare
from jaxvllm.runtime.slot_fields import HISTORY, LENGTH, DeviceState, Rows, SlotField
from jaxvllm.runtime.token_mask import mask_words, pack_bits, unpack_bits

# What an int16 can count. A token that comes more often is penalized as if it had come this often.
MAX_COUNT = 2**15 - 1


def _prompt_bits(admission: Admission) -> NDArray[np.int32] | None:
    request = admission.request
    return pack_bits(request.asked.prompt.known_token_ids) if request.sampling_params.is_penalized else None


REPETITION = SlotField("repetition_penalty", np.float32, 1, lambda a: a.request.sampling_params.repetition_penalty)
FREQUENCY = SlotField("frequency_penalty", np.float32, 0, lambda a: a.request.sampling_params.frequency_penalty)
PRESENCE = SlotField("presence_penalty", np.float32, 0, lambda a: a.request.sampling_params.presence_penalty)
PROMPT_TOKENS = SlotField(  # as bits, those of a token mask
    "prompt_tokens", np.int32, 0, _prompt_bits, lambda sizes: (mask_words(sizes.vocab_size),), is_rare=True
)
OUTPUT_COUNTS = SlotField("output_counts", np.int16, 0, None, lambda sizes: (sizes.vocab_size,), is_rare=True)


def count_tokens(state: DeviceState, slots: jax.Array, tokens: jax.Array, counts: jax.Array) -> DeviceState:
    """Counts the first `counts[r]` of `tokens` i32[R, N] that `slots` i32[R] have sampled, if these have penalties."""
    known, places = state[OUTPUT_COUNTS.name], jnp.arange(tokens.shape[1])
    at = jnp.where(_asks(Rows(state, slots)), slots, len(known))  # past all, so dropped
    at = jnp.where(places < counts[:, None], at[:, None], len(known))
    # A token may be there several times: the last one has counted the others, and the largest number stays.
    is_earlier = (tokens[:, :, None] == tokens[:, None]) & (places[:, None] > places)
    reached = known[slots[:, None], tokens].astype(jnp.int32) + is_earlier.sum(axis=2, dtype=jnp.int32) + 1
    reached = jnp.minimum(reached, MAX_COUNT).astype(known.dtype)
    return state | {OUTPUT_COUNTS.name: known.at[at, tokens].max(reached, mode="drop")}


def _asks(rows: Rows) -> jax.Array:
    return (rows[REPETITION.name] != 1) | (rows[FREQUENCY.name] != 0) | (rows[PRESENCE.name] != 0)


def _draft_counts(rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Returns i16[R, V]: how often each token of this share is among the drafts in front of each row's position."""
    row = jnp.arange(len(positions))
    counts = jnp.zeros((len(positions), share.size), jnp.int16)
    for place in range(rows.num_drafts):
        at = rows[LENGTH.name] + place
        drafts = rows.state[HISTORY.name][rows.slots, at]
        columns = jnp.where(at < positions, share.columns(drafts), share.size)
        counts = counts.at[row, columns].add(1, mode="drop")
    return counts


def _penalize(logits: jax.Array, rows: Rows, positions: jax.Array, share: VocabShare) -> jax.Array:
    """Applies repetition, which counts the prompt's tokens, too, and then frequency and presence, which do not."""
    # To gather whole rows first, and then take a share of them, took 0.39 GB of temporaries, most of the sampler's, for
    # 256 rows of 248,320 tokens on four v6e.
    counts = share.take(rows.state[OUTPUT_COUNTS.name])[rows.slots]
    if rows.num_drafts:
        counts += _draft_counts(rows, positions, share)
    in_output = counts > 0
    is_repeated = in_output | unpack_bits(rows[PROMPT_TOKENS.name], share)
    repetition = rows[REPETITION.name][:, None]
    penalized = jnp.where(is_repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    penalized -= rows[FREQUENCY.name][:, None] * counts.astype(jnp.float32)
    penalized -= rows[PRESENCE.name][:, None] * in_output.astype(jnp.float32)
    # A row that does not ask has the counts of a former tenant.
    return jnp.where(_asks(rows)[:, None], penalized, logits)


PENALTIES = LogitRule(
    (REPETITION, FREQUENCY, PRESENCE, PROMPT_TOKENS, OUTPUT_COUNTS), lambda rows, positions: _asks(rows), _penalize
)
