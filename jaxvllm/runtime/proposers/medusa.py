"""Drafts by Medusa heads: all at once, from the hidden state in front of a row's last token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxvllm.models.heads.medusa import MedusaHeads
from jaxvllm.models.params import Params
from jaxvllm.runtime.cache_shape import DraftCache, KVCachePages
from jaxvllm.runtime.proposers.proposer import Drafts, Known
from jaxvllm.runtime.sampler import guess
from jaxvllm.runtime.slot_fields import FEATURE_LENGTH, FEATURES, DeviceState, Rows
from jaxvllm.runtime.step_model import Computed, StepModel, trash_slot


@dataclass(frozen=True)
class MedusaProposer:
    """Guesses with the heads, with the noise that the model will draw with."""

    heads: MedusaHeads

    @property
    def cache(self) -> DraftCache:
        return DraftCache(num_features=self.heads.hidden_size)

    @property
    def follows_all(self) -> bool:
        return True

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        state, slots, lengths, model = known.state, known.slots, known.lengths, known.model
        is_ready = state[FEATURE_LENGTH.name][slots] == lengths - 1
        hidden = state[FEATURES.name][slots].astype(known.params["embed"].dtype)
        count = min(num_drafts, self.heads.num_heads)
        logits = self.heads.logits(known.params, hidden, count, model.spec, model.shard, model.axis)
        tokens = [
            guess(one, Rows(state, slots), lengths + place, model.spec.vocab_size, model.axis)
            for place, one in enumerate(logits)
        ]
        tokens += tokens[-1:] * (num_drafts - count)
        return known.kv_pages, Drafts(jnp.stack(tokens, axis=1), jnp.where(is_ready, count, 0))

    def follow(
        self,
        params: Params,
        kv_pages: KVCachePages,
        state: DeviceState,
        slots: jax.Array,
        computed: Computed,
        counts: jax.Array,
        model: StepModel,
        num_drafted: jax.Array | None = None,
    ) -> tuple[KVCachePages, DeviceState]:
        rows, trash = computed.rows, trash_slot(state)
        at = jnp.where((counts > 0) & (slots != trash), slots, trash + 1)  # past all, so dropped
        last = jnp.clip(rows.query_starts[:-1] + counts - 1, 0, len(computed.hidden) - 1)
        reached = rows.kv_lens - rows.query_lens() + counts
        return kv_pages, state | {
            FEATURES.name: state[FEATURES.name].at[at].set(computed.hidden[last].astype(jnp.float32), mode="drop"),
            FEATURE_LENGTH.name: state[FEATURE_LENGTH.name].at[at].set(reached, mode="drop"),
        }
