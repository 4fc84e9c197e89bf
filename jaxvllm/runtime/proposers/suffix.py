"""Drafts from everything that the slots have: suffix decoding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxvllm.runtime.proposers.proposer import Drafts, HistoryProposer
from jaxvllm.runtime.slot_fields import HISTORY, LENGTH, DeviceState
from jaxvllm.runtime.suffix_index import NGRAMS, places_behind, tokens_before


@dataclass(frozen=True)
class SuffixProposer(HistoryProposer):
    """Guesses that a row goes on as some row of any slot did after the same tokens, also one that has ended.

    The place counts before which most tokens are the same, of `deepest` that are compared. The more these are, the more
    are guessed: `factor` times as many. A loop at the end of the row itself is taken to go on.
    (G. Oliaro et al., "SuffixDecoding", 2024. They keep trees of tokens; here it is the histories with an index.)
    """

    deepest: int
    factor: float

    @property
    def reads_index(self) -> bool:
        return True

    def look(self, state: DeviceState, slots: jax.Array, lengths: jax.Array, num_drafts: int) -> Drafts:
        history = state[HISTORY.name]
        last = tokens_before(history, slots, lengths, max(self.deepest, *NGRAMS))
        there, places, is_place = places_behind(state, last, lengths)  # [R, N]
        backwards = jnp.arange(self.deepest)
        same = tokens_before(history, there, places, self.deepest) == last[:, None, : self.deepest]
        same &= (backwards < places[..., None]) & (backwards < lengths[:, None, None])
        num_same = jnp.cumprod(same, axis=2, dtype=jnp.int32).sum(axis=2)
        # After the tokens of a slot's tenant are those of earlier ones.
        known = state[LENGTH.name][there]
        num_behind = jnp.where(places <= known, known, history.shape[1]) - places
        is_own = (there == slots[:, None]) & (places < lengths[:, None])
        allowed = (self.factor * num_same.astype(jnp.float32)).astype(jnp.int32)
        counts = jnp.where(is_own, num_drafts, jnp.minimum(num_behind, num_drafts))
        counts = jnp.where(is_place, jnp.minimum(counts, allowed), 0)
        # The most tokens that are the same, and of these the most drafts.
        best = jnp.argmax(jnp.where(counts > 0, num_same * (num_drafts + 1) + counts, 0), axis=1)[:, None]
        there, places, counts, is_own = (jnp.take_along_axis(x, best, axis=1) for x in (there, places, counts, is_own))
        period = jnp.where(is_own, lengths[:, None] - places, num_drafts)
        drafts = history.at[there, places + jnp.arange(num_drafts) % period].get(mode="clip")
        return Drafts(drafts, counts[:, 0])
