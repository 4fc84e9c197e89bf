"""Drafts by Medusa heads: all at once, from the hidden state in front of a row's last token."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxvllm.models.heads.medusa import MedusaHeads
from jaxvllm.runtime.cache_shape import DraftCache, KVCachePages
from jaxvllm.runtime.proposers.proposer import Drafts, Known, SeenStep
from jaxvllm.runtime.sampler import guess
from jaxvllm.runtime.slot_fields import FEATURE_LENGTH, DeviceState, Rows


@dataclass(frozen=True)
class MedusaProposer:
    """Guesses with the heads, with the noise that the model will draw with."""

    heads: MedusaHeads

    @property
    def cache(self) -> DraftCache:
        return DraftCache(num_features=self.heads.hidden_size)

    @property
    def sees_all(self) -> bool:
        return False  # the first step with drafts after one that it did not see has none, and shows it the features

    @property
    def reads_index(self) -> bool:
        return False

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        state, slots, lengths, model = known.state, known.slots, known.lengths, known.model
        is_ready = state[FEATURE_LENGTH.name][slots] == lengths - 1
        hidden = known.features
        count = min(num_drafts, self.heads.num_heads)
        logits = self.heads.logits(known.params, hidden, count, model.spec, model.shard, model.axis)
        tokens = [
            guess(one, Rows(state, slots), lengths + place, model.spec.vocab_size, model.axis)
            for place, one in enumerate(logits)
        ]
        tokens += tokens[-1:] * (num_drafts - count)
        return known.kv_pages, Drafts(jnp.stack(tokens, axis=1), jnp.where(is_ready, count, 0))

    def see(self, step: SeenStep) -> tuple[KVCachePages, DeviceState]:
        return step.kv_pages, step.with_features(step.computed.hidden)
