"""Drafts by a small network: it guesses a token, takes the guess for granted, and guesses the next one."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxvllm.models.heads.head import DraftHead
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.params import Params, activation_dtype
from jaxvllm.runtime.cache_shape import DraftCache, KVCachePages
from jaxvllm.runtime.proposers.proposer import Drafts, Known, SeenStep
from jaxvllm.runtime.sampler import guess
from jaxvllm.runtime.slot_fields import DRAFT_LENGTH, FEATURE_LENGTH, DeviceState, Rows
from jaxvllm.runtime.step_model import StepModel
from pallas_kernels.ragged_paged_attention import NO_WINDOW, IndexQueries, KVPages, RaggedRows

# Tokens of each row that a head catches up with at once.
CATCH_UP = 8


@dataclass(frozen=True)
class AutoregressiveProposer:
    """Runs a head once for each draft. It draws with the noise that the model will draw with.

    If there are N heads, number n guesses the drafts n, n + N, ... of a step. All are alike but for their parameters
    and layers, and each sees every token, with what the head before it thought at the position before.

    Keys and values of the heads lie in pages of their own with the numbers of the pages of the model's first group. So
    whatever the host does with a page (sharing, evicting, preempting) it does with both.

    Position p of the first head sees token p and the feature of position p - 1, what the model thought there. Where
    nobody knows that feature, at the start and after a cached prefix, the feature of position p stands in.
    """

    heads: tuple[DraftHead, ...]

    @property
    def cache(self) -> DraftCache:
        spec, count = self.heads[0].spec, len(self.heads)
        num_features = count * self.heads[0].feature_size
        return DraftCache(count * spec.num_layers, spec.layers[0].memory, num_features)

    @property
    def sees_all(self) -> bool:
        return self.heads[0].feature_size > 0

    @property
    def reads_index(self) -> bool:
        return False

    @property
    def depths(self) -> tuple[int, ...]:
        return self.heads[0].depths

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        state, slots, lengths, model = known.state, known.slots, known.lengths, known.model
        tables, kv_pages = state["page_tables"][slots], known.kv_pages
        is_ready = known.room > 0
        if self.sees_all:
            # Both differ where it did not see every step of a row.
            is_ready &= state[FEATURE_LENGTH.name][slots] == lengths - 1
            is_ready &= state[DRAFT_LENGTH.name][slots] == lengths - 1
        else:
            kv_pages = self._catch_up(known, is_ready)

        def guess_next(
            place: jax.Array, carry: tuple[KVCachePages, jax.Array, jax.Array, jax.Array]
        ) -> tuple[KVCachePages, jax.Array, jax.Array, jax.Array]:
            kv_pages, features, tokens, drafts = carry
            active = is_ready & (place < known.room)
            starts = jnp.where(active, lengths - 1 + place, 0)
            rows = RaggedRows.build(tables[:, 0], starts, active.astype(jnp.int32), len(slots))
            thought, after = [], []
            for head, before in zip(self.heads, self._of_heads(features), strict=True):
                hidden, feature, kv_pages = self._apply(head, known.params, kv_pages, tokens, rows, before, model)
                thought.append(hidden)
                after.append(feature)
            # After the last head comes the first.
            features = jnp.concatenate([*after[-1:], *after[:-1]], axis=1)
            hidden = thought[0] if len(thought) == 1 else jnp.stack(thought)[place % len(thought)]
            logits = self.heads[0].logits(known.params, hidden, model.spec, model.shard, model.axis)
            tokens = guess(logits, Rows(state, slots), starts + 1, model.spec.vocab_size, model.axis)
            return kv_pages, features, tokens, drafts.at[:, place].set(tokens)

        last = state["history"][slots, jnp.maximum(lengths - 1, 0)]
        features = jnp.zeros((len(slots), 0), activation_dtype(known.params))
        if self.sees_all:
            features = known.features
        drafts = jnp.zeros((len(slots), num_drafts), jnp.int32)
        start = (kv_pages, features, last, drafts)
        kv_pages, _, _, drafts = jax.lax.fori_loop(0, num_drafts, guess_next, start)
        return kv_pages, Drafts(drafts, jnp.where(is_ready, num_drafts, 0))

    def _catch_up(self, known: Known, wanted: jax.Array) -> KVCachePages:
        """Computes of the rows `wanted` bool[R] what the head has not seen before their last token."""
        state, slots, num_rows = known.state, known.slots, len(known.slots)
        tables, ends = state["page_tables"][slots], jnp.where(wanted, known.lengths - 1, 0)
        features = jnp.zeros((num_rows * CATCH_UP, 0), activation_dtype(known.params))

        def some(carry: tuple[jax.Array, KVCachePages]) -> tuple[jax.Array, KVCachePages]:
            done, kv_pages = carry
            counts = jnp.clip(ends - done, 0, CATCH_UP)
            rows = RaggedRows.build(tables[:, 0], jnp.where(counts > 0, done, 0), counts, num_rows * CATCH_UP)
            tokens = state["history"][slots[rows.token_rows], rows.positions]
            [head] = self.heads
            _, _, kv_pages = self._apply(head, known.params, kv_pages, tokens, rows, features, known.model)
            return done + counts, kv_pages

        start = (jnp.minimum(state[DRAFT_LENGTH.name][slots], ends), known.kv_pages)
        kv_pages: KVCachePages = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < ends), some, start)[1]
        return kv_pages

    def see(self, step: SeenStep) -> tuple[KVCachePages, DeviceState]:
        state, slots, computed, starts = step.state, step.slots, step.computed, step.starts
        known = state[DRAFT_LENGTH.name][slots]
        if step.num_guessed is not None and not self.sees_all:
            # Proposing computed the last token and all guesses but the last, those too that had no room in the step.
            reached = jnp.where(step.num_guessed > 0, starts + jnp.minimum(step.counts, step.num_guessed), known)
            return step.kv_pages, state | {DRAFT_LENGTH.name: step.stored(DRAFT_LENGTH.name, reached)}
        features = self.heads[0].features(step.params, computed.hidden, computed.states)  # [T, F]
        rows, kv_pages = replace(computed.rows, page_table=state["page_tables"][slots][:, 0]), step.kv_pages
        seen: list[jax.Array] = []  # by each head
        kept = step.features if self.sees_all else None
        for number, head in enumerate(self.heads):
            seen.append(features)
            before = features if kept is None else self._shifted(features, self._of_heads(kept)[number], step)
            _, features, kv_pages = self._apply(
                head, step.params, kv_pages, computed.token_ids, rows, before, step.model
            )
        if kept is not None:
            state = step.with_features(jnp.concatenate(seen, axis=1))
        # A row that starts again after a wrong guess had got farther.
        reached = jnp.where(known >= starts, starts + step.counts, known)
        return kv_pages, state | {DRAFT_LENGTH.name: step.stored(DRAFT_LENGTH.name, reached)}

    def _of_heads(self, features: jax.Array) -> list[jax.Array]:
        """Returns what each head sees of `features` [X, N F]: [X, F]."""
        return jnp.split(features, len(self.heads), axis=1)

    def _shifted(self, features: jax.Array, kept: jax.Array, step: SeenStep) -> jax.Array:
        """Returns for each token the feature of the position before it, [T, F].

        The first token of a row gets the feature that was `kept` [R, F], or its own if none was kept.
        """
        rows, num_tokens = step.computed.rows, len(features)
        firsts = rows.query_starts[:-1]
        is_known = (step.state[FEATURE_LENGTH.name][step.slots] == step.starts) & (step.starts > 0)
        first = jnp.where(is_known[:, None], kept, features[jnp.minimum(firsts, num_tokens - 1)])
        is_first = rows.is_real() & (jnp.arange(num_tokens) == firsts[rows.token_rows])
        return jnp.where(is_first[:, None], first[rows.token_rows], jnp.roll(features, 1, axis=0))

    def _apply(
        self,
        head: DraftHead,
        params: Params,
        kv_pages: KVCachePages,
        token_ids: jax.Array,
        rows: RaggedRows,
        features: jax.Array,
        model: StepModel,
    ) -> tuple[jax.Array, jax.Array, KVCachePages]:
        """Runs `head` over `token_ids` i32[T] with `features` [T, F]: its hidden states, and the next features."""
        *others, pages = kv_pages
        layer, backend = head.spec.layers[0], model.backend
        # Pages that left the window of the model's first group are somebody else's.
        held = model.shape.groups(model.spec)[0].window or NO_WINDOW
        memory = layer.memory
        assert isinstance(memory, KeysAndValues), "draft heads keep keys and values"
        plan = memory.plan(rows, pages, layer.attention.num_heads, activation_dtype(params), backend)

        def attend(
            kv: KVPages,
            given: LayerInput,
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            *,
            scale: float,
            soft_cap: float | None,
            sinks: jax.Array | None = None,
            slopes: jax.Array | None = None,
            kv_scales: jax.Array | None = None,
            index: IndexQueries | Literal["last"] | None = None,
        ) -> tuple[jax.Array, KVPages]:
            assert index != "last", "a head has no layer before its own"
            options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "slopes": slopes}
            options |= {"index": index, "plan": plan, "backend": backend}
            options |= {"quantization": model.shape.draft_quantization, "kv_scales": kv_scales}
            window = given.window
            assert isinstance(window, int), "the layers of heads are in no loop"
            return memory.attend(kv, given.number, rows, q, k, v, min(window, held), **options)

        hidden, features, pages = head.apply(params, token_ids, rows.positions, features, pages, attend, model.axis)
        return hidden, features, (*others, pages)
