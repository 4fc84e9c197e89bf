"""Drafts from the row itself: prompt lookup."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxvllm.runtime.proposers.proposer import Drafts, HistoryProposer
from jaxvllm.runtime.slot_fields import HISTORY, DeviceState


@dataclass(frozen=True)
class NgramProposer(HistoryProposer):
    """Guesses that a row goes on as it did after the last tokens that were the same: prompt lookup decoding.

    The most tokens count that are the same, from `shortest` to `longest`, and then the place nearest to the end. A
    place so near that not all drafts follow it is the end of a loop, which is taken to go on.
    (A. Saxena, "Prompt Lookup Decoding", 2023.)
    """

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= self.longest:
            raise ValueError(
                f"prompt_lookup_min must be from 1 to prompt_lookup_max, got {self.shortest} and {self.longest}"
            )

    def look(self, state: DeviceState, slots: jax.Array, lengths: jax.Array, num_drafts: int) -> Drafts:
        tokens = state[HISTORY.name][slots]  # i32[R, L]
        places = jnp.arange(tokens.shape[1])
        # How many tokens before each place equal as many before the end of the row.
        same = jnp.ones(tokens.shape, jnp.bool_)
        num_same = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(1, self.longest + 1):
            last = jnp.take_along_axis(tokens, jnp.maximum(lengths - back, 0)[:, None], axis=1)
            same &= (jnp.roll(tokens, back, axis=1) == last) & (places >= back)
            num_same += same.astype(jnp.int32)
        is_before = places < lengths[:, None]
        found = jnp.where(is_before & (num_same >= self.shortest), num_same, 0)
        # The largest number, and of these the last place. On CPU a maximum is found faster than where it is.
        best = jnp.max(jnp.where(found > 0, found * tokens.shape[1] + places, 0), axis=1)
        place = best % tokens.shape[1]
        period = jnp.maximum(lengths - place, 1)
        at = place[:, None] + jnp.arange(num_drafts) % period[:, None]
        drafts = jnp.take_along_axis(tokens, at, axis=1, mode="clip")
        return Drafts(drafts, jnp.where(best > 0, num_drafts, 0))
