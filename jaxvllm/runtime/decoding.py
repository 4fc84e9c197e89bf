"""Decoding: several steps of rows whose prompts are computed already, in one program that asks the host nothing.

Each step computes a row's last token, and after it what a proposer guesses. Each position is sampled as it would have
been alone, and a row goes on as far as its drafts are what was sampled (decision 0007).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import for_head, project_logits
from jaxvllm.models.params import Params
from jaxvllm.runtime.batch import unpack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import KVCachePages
from jaxvllm.runtime.conditional_loop import run_if
from jaxvllm.runtime.draft_share import measured_acceptance, share_drafts
from jaxvllm.runtime.expert_loads import with_loads
from jaxvllm.runtime.proposers import Drafts, Known, Proposer, SeenStep
from jaxvllm.runtime.sampler import DeviceLogprobs
from jaxvllm.runtime.slot_fields import ACCEPTANCE, DeviceState, Rows
from jaxvllm.runtime.step_model import (
    DRAFT_MARK,
    Computed,
    DeviceOutput,
    StepModel,
    adapters_of,
    append,
    are_alive,
    are_stops,
    commit,
    compute,
    draw,
    open_pages,
    trash_slot,
)
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import RaggedRows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num_steps", "kv_pages", "state", "counts", "tokens", "logprobs", "num_drafted", "num_accepted"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _DecodeLoop:
    """The values that the loop of `decode` carries, with Y tokens a row at most and K drafts in a step."""

    num_steps: jax.Array  # i32
    kv_pages: KVCachePages
    state: DeviceState
    counts: jax.Array  # i32[R]: tokens that each row has yielded
    tokens: jax.Array  # i32[R, Y], with DRAFT_MARK
    logprobs: DeviceLogprobs  # [Y, R]
    num_drafted: jax.Array  # i32[R, K]: drafts that there were, by their place
    num_accepted: jax.Array  # i32[R, K]

    @classmethod
    def begin(cls, kv_pages: KVCachePages, state: DeviceState, bucket: Bucket, vocab_size: int) -> "_DecodeLoop":
        num_rows, row_tokens = bucket.num_rows, bucket.row_tokens
        best = DeviceLogprobs.zeros(num_rows, vocab_size)
        best = jax.tree.map(lambda x: jnp.zeros((row_tokens, *x.shape), x.dtype), best)
        counts, tokens = jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, row_tokens), jnp.int32)
        drafts = jnp.zeros((num_rows, bucket.num_drafts), jnp.int32)
        return cls(jnp.int32(0), kv_pages, state, counts, tokens, best, drafts, drafts)

    def take(self, counts: jax.Array, tokens: jax.Array, best: DeviceLogprobs) -> "_DecodeLoop":
        """Appends the first `counts[r]` of `tokens` i32[R, N] to row r, with what is reported of them, [R, N]."""
        places = jnp.arange(tokens.shape[1])
        at = jnp.where(places < counts[:, None], self.counts[:, None] + places, self.tokens.shape[1])
        row = jnp.arange(len(tokens))[:, None]
        return replace(
            self,
            counts=self.counts + counts,
            tokens=self.tokens.at[row, at].set(tokens, mode="drop"),
            logprobs=jax.tree.map(lambda all_, now: all_.at[at, row].set(now, mode="drop"), self.logprobs, best),
        )

    @property
    def output(self) -> DeviceOutput:
        columns = (self.counts[:, None], self.tokens, self.num_drafted, self.num_accepted)
        return DeviceOutput(jnp.concatenate(columns, axis=1), self.logprobs)


def decode(
    params: Params,
    kv_pages: KVCachePages,
    state: DeviceState,
    packed: jax.Array,
    *,
    model: StepModel,
    bucket: Bucket,
    proposer: Proposer | None = None,
) -> tuple[KVCachePages, DeviceState, DeviceOutput]:
    """Takes up to `bucket.width` decode steps, as many as the batch says, and stops when every row has ended.

    `kv_pages` and `state` are donated. Each row's position and input token come from `state`, and what it samples stays
    there, so a caller dispatches the next step before reading this one. A row that ends yields no more tokens. Inside
    shard_map each device has its share of `params` and `kv_pages`, and the same of everything else.
    """
    batch = unpack(packed, bucket, model.sizes)

    def alive(now: _DecodeLoop) -> jax.Array:
        return are_alive(now.state, batch.slots) & (now.counts < batch.max_new)

    def once(now: _DecodeLoop) -> _DecodeLoop:
        is_alive = alive(now)
        slots = jnp.where(is_alive, batch.slots, trash_slot(state))
        if not bucket.num_drafts:
            return _decode_once(params, now, is_alive, slots, model=model, proposer=proposer)
        assert proposer is not None, "nobody proposes drafts"
        most = batch.max_new - now.counts
        return _draft_and_verify(params, now, is_alive, slots, most, model=model, bucket=bucket, proposer=proposer)

    now = _DecodeLoop.begin(kv_pages, open_pages(state, batch), bucket, model.spec.vocab_size)
    if bucket.width == 1:
        now = once(now)
    else:
        now = jax.lax.while_loop(lambda now: (now.num_steps < batch.num_steps) & jnp.any(alive(now)), once, now)
    return now.kv_pages, now.state, now.output


def _decode_once(
    params: Params,
    now: _DecodeLoop,
    is_alive: jax.Array,
    slots: jax.Array,
    *,
    model: StepModel,
    proposer: Proposer | None,
) -> _DecodeLoop:
    """Computes one token for each row that is alive. A `proposer` sees the step."""
    lengths = now.state["length"][slots]
    starts = jnp.where(is_alive, lengths - 1, 0)
    tables = now.state["page_tables"][slots]
    rows = RaggedRows.build(tables[:, 0], starts, is_alive.astype(jnp.int32), len(slots))
    last = now.state["history"][slots, starts]
    depths = () if proposer is None else proposer.depths
    adapters = adapters_of(now.state, slots, model)
    computed, kv_pages = compute(params, now.kv_pages, last, rows, tables, model, depths, adapters=adapters)
    logits = _logits_of(params, computed, model)
    tokens, best = draw(now.state, logits, slots, lengths, model)
    counts = is_alive.astype(jnp.int32)
    is_over = are_stops(now.state, tokens, slots, lengths)
    state = with_loads(now.state, computed.loads)
    if proposer is not None:
        with jax.named_scope("see"):
            kv_pages, state = proposer.see(SeenStep(params, kv_pages, state, slots, model, computed, counts))
    state = append(state, slots, lengths, tokens[:, None], counts, is_over)
    now = replace(now, num_steps=now.num_steps + 1, kv_pages=kv_pages, state=state)
    return now.take(counts, tokens[:, None], jax.tree.map(lambda x: x[:, None], best))


def _logits_of(params: Params, computed: Computed, model: StepModel) -> jax.Array:
    """Returns the logits of all tokens, f32[T, V], of which each device has its share."""
    hidden = computed.hidden
    if computed.adapters is not None:
        hidden = for_head(params, model.shard, hidden, computed.adapters)
    return project_logits(params, model.shard, hidden)


def _draft_and_verify(
    params: Params,
    now: _DecodeLoop,
    is_alive: jax.Array,
    slots: jax.Array,
    most: jax.Array,
    *,
    model: StepModel,
    bucket: Bucket,
    proposer: Proposer,
) -> _DecodeLoop:
    """Computes up to K + 1 tokens for each row that is alive, and at most `most` i32[R]."""
    lengths = now.state["length"][slots]
    # The token after the last draft is sampled, too.
    room = jnp.where(is_alive, jnp.maximum(jnp.minimum(most, Rows(now.state, slots)["limit"] - lengths) - 1, 0), 0)
    with jax.named_scope("propose"):
        known = Known(params, now.kv_pages, now.state, slots, model, lengths, room)
        kv_pages, drafts = proposer.propose(known, bucket.num_drafts)
        drafts = replace(drafts, counts=jnp.clip(drafts.counts, 0, room))
    now = replace(now, kv_pages=kv_pages)

    def verify(now: _DecodeLoop) -> _DecodeLoop:
        return _verify(params, now, is_alive, slots, drafts, model=model, bucket=bucket, proposer=proposer)

    if proposer.cache is not None:
        return verify(now)

    def decode_once(now: _DecodeLoop) -> _DecodeLoop:
        return _decode_once(params, now, is_alive, slots, model=model, proposer=None)

    # Text that nothing repeats has no drafts, and then a step costs what it costs without a proposer. Replicas that run
    # it together do the same: in either way they send each other the tokens of experts.
    has_drafts = model.replicas.max(jnp.any(drafts.counts > 0).astype(jnp.int32)) > 0
    return _either(has_drafts, verify, decode_once, now, model.backend)


def _either(
    condition: jax.Array,
    run: Callable[[_DecodeLoop], _DecodeLoop],
    otherwise: Callable[[_DecodeLoop], _DecodeLoop],
    now: _DecodeLoop,
    backend: Backend,
) -> _DecodeLoop:
    """Returns `run(now)` where `condition` bool is true, and `otherwise(now)` elsewhere.

    On a TPU, loops have 3 MiB more of temporaries than a conditional.
    """
    if backend.kind in ("tpu", "cpu"):
        return jax.lax.cond(condition, run, otherwise, now)
    return run_if(~condition, otherwise, run_if(condition, run, now))


def _verify(
    params: Params,
    now: _DecodeLoop,
    is_alive: jax.Array,
    slots: jax.Array,
    drafts: Drafts,
    *,
    model: StepModel,
    bucket: Bucket,
    proposer: Proposer,
) -> _DecodeLoop:
    """Runs one step with drafts after the last token of each row that is alive, as many as the bucket has room for.

    All positions are sampled at once. A position counts only if each draft before it is what was sampled there, and
    then its logits, its noise and its history are those that it would have had without drafts.
    """
    num_drafts, num_tokens, state = bucket.num_drafts, bucket.num_tokens, now.state
    lengths = state["length"][slots]
    starts = jnp.where(is_alive, lengths - 1, 0)
    tables = state["page_tables"][slots]
    counts, divides = drafts.counts, num_tokens < len(slots) * (1 + num_drafts)
    if divides:
        # Padding rows have no token, so that theirs are for drafts, too.
        room = num_tokens - is_alive.sum(dtype=jnp.int32)
        counts = share_drafts(counts, state[ACCEPTANCE.name][slots], room, num_drafts)
    places = jnp.arange(num_drafts)
    drafted = places < counts[:, None]  # [R, K]
    guesses = jnp.clip(drafts.tokens, 0, model.spec.vocab_size - 1)
    each = jnp.where(drafted, slots[:, None], trash_slot(state) + 1)  # past all, so dropped
    state |= {"history": state["history"].at[each, lengths[:, None] + places].set(guesses, mode="drop")}

    rows = RaggedRows.build(tables[:, 0], starts, jnp.where(is_alive, 1 + counts, 0), num_tokens)
    token_slots = jnp.where(rows.is_real(), slots[rows.token_rows], trash_slot(state))
    token_ids = state["history"][token_slots, rows.positions]
    most = 1 + num_drafts
    ways = proposer.depths, most, None, None, adapters_of(state, slots, model)
    computed, kv_pages = compute(params, now.kv_pages, token_ids, rows, tables, model, *ways)
    state = with_loads(state, computed.loads)
    logits = _logits_of(params, computed, model)
    next_positions = rows.positions + 1
    tokens, best = draw(state, logits, token_slots, next_positions, model, num_drafts)
    is_stop = are_stops(state, tokens, token_slots, next_positions)

    of_row = jnp.minimum(rows.query_starts[:-1, None] + jnp.arange(1 + num_drafts), num_tokens - 1)  # [R, 1 + K]
    tokens, is_stop = tokens[of_row], is_stop[of_row]
    matches = drafted & (tokens[:, :-1] == guesses)
    goes_on = jnp.cumprod(matches & ~is_stop[:, :-1], axis=1, dtype=jnp.int32)
    yielded = jnp.where(is_alive, 1 + goes_on.sum(axis=1), 0)
    accepted = matches & (places < yielded[:, None])
    is_over = jnp.take_along_axis(is_stop, jnp.maximum(yielded - 1, 0)[:, None], axis=1)[:, 0]
    kv_pages = commit(computed, kv_pages, tables, yielded, model)
    with jax.named_scope("see"):
        step = SeenStep(params, kv_pages, state, slots, model, computed, yielded, drafts.counts)
        kv_pages, state = proposer.see(step)
        if divides:
            measured = measured_acceptance(state[ACCEPTANCE.name][slots], counts, accepted.sum(axis=1))
            state |= {ACCEPTANCE.name: step.stored(ACCEPTANCE.name, measured)}
    now = replace(
        now,
        num_steps=now.num_steps + 1,
        kv_pages=kv_pages,
        state=append(state, slots, lengths, tokens, yielded, is_over),
        num_drafted=now.num_drafted + drafted.astype(jnp.int32),
        num_accepted=now.num_accepted + accepted.astype(jnp.int32),
    )
    marks = DRAFT_MARK * jnp.pad(accepted, ((0, 0), (0, 1))).astype(jnp.int32)  # nothing guessed the last token
    return now.take(yielded, tokens + marks, jax.tree.map(lambda x: x[of_row], best))
