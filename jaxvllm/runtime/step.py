"""The step: pure functions from a packed batch to the tokens of its rows. The heart of the engine.

tokens -> decoder (writes and reads pages) -> last hidden of each row -> logits -> sampled tokens -> state

Decode rows go through all of it up to W times in one program, `decode`: nothing returns to the host in between. Where
prompts are computed, or a row waits for the host, the step is two programs: `forward`, then `sample_rows`, which is
compiled once a row count and not once a bucket.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.decoder import forward as run_decoder
from jaxvllm.models.decoder import project_logits
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.batch import Batch, unpack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape, KVCachePages
from jaxvllm.runtime.penalties import count_tokens
from jaxvllm.runtime.prompt_scores import PromptScores, score
from jaxvllm.runtime.proposers import Drafts, Proposer
from jaxvllm.runtime.sampler import (
    DEFAULT_OPTIONS,
    DeviceLogprobs,
    SamplerOptions,
    distributions,
    logprobs,
    sample,
    token_logprobs,
)
from jaxvllm.runtime.slot_fields import DeviceState, Rows, SlotSizes
from jaxvllm.runtime.token_mask import IS_MASKED
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import NO_WINDOW, RaggedRows, plan_rows, ragged_paged_attention
from sharding.axis import ALONE, ModelAxis


@dataclass(frozen=True)
class StepModel:
    """What a step computes, whatever the batch: the model, and the devices and kernels that compute it."""

    spec: ModelSpec
    shape: CacheShape
    backend: Backend
    axis: ModelAxis = ALONE
    sampling: SamplerOptions = DEFAULT_OPTIONS
    proposer: Proposer | None = None  # for buckets with drafts

    @property
    def sizes(self) -> SlotSizes:
        return self.shape.sizes(self.spec)


@partial(jax.tree_util.register_dataclass, data_fields=["yielded", "logprobs"], meta_fields=[])
@dataclass(frozen=True)
class DeviceOutput:
    """What a step yields for its R rows."""

    # i32[R, 1 + W + 2 K]: how many tokens, then the tokens, then for each place of a draft how often there was one, and
    # how often it was accepted. One array, since each is a transfer.
    yielded: jax.Array
    logprobs: DeviceLogprobs  # [W, R]


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "slots", "positions"], meta_fields=[])
@dataclass(frozen=True)
class Unsampled:
    """What `forward` leaves for `sample_rows`, R rows."""

    hidden: jax.Array  # f[R, E], of each row's last token
    slots: jax.Array  # i32[R]; the trash slot where a row yields nothing
    positions: jax.Array  # i32[R], of the token to sample


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["num_steps", "kv_pages", "state", "counts", "tokens", "logprobs", "num_drafted", "num_accepted"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _Decoding:
    """How far a call of `decode` got, with W tokens a row at most and K drafts in a step."""

    num_steps: jax.Array  # i32
    kv_pages: KVCachePages
    state: DeviceState
    counts: jax.Array  # i32[R]: tokens that each row has yielded
    tokens: jax.Array  # i32[R, W]
    logprobs: DeviceLogprobs  # [W, R]
    num_drafted: jax.Array  # i32[R, K]: drafts that there were, by their place
    num_accepted: jax.Array  # i32[R, K]

    @classmethod
    def begin(cls, kv_pages: KVCachePages, state: DeviceState, bucket: Bucket, vocab_size: int) -> "_Decoding":
        num_rows, width = bucket.num_rows, bucket.row_tokens
        best = DeviceLogprobs.zeros(num_rows, vocab_size)
        best = jax.tree.map(lambda x: jnp.zeros((width, *x.shape), x.dtype), best)
        counts, tokens = jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, width), jnp.int32)
        drafts = jnp.zeros((num_rows, bucket.num_drafts), jnp.int32)
        return cls(jnp.int32(0), kv_pages, state, counts, tokens, best, drafts, drafts)

    def take(self, rows: jax.Array, state: DeviceState, tokens: jax.Array, best: DeviceLogprobs) -> "_Decoding":
        """Appends the tokens of those `rows` bool[R] that yield one, with which the state has become `state`."""
        row, at = jnp.arange(len(rows)), jnp.where(rows, self.counts, self.tokens.shape[1])
        return replace(
            self,
            state=state,
            counts=self.counts + rows.astype(jnp.int32),
            tokens=self.tokens.at[row, at].set(tokens, mode="drop"),
            logprobs=jax.tree.map(lambda all_, now: all_.at[at, row].set(now, mode="drop"), self.logprobs, best),
        )

    @property
    def output(self) -> DeviceOutput:
        columns = (self.counts[:, None], self.tokens, self.num_drafted, self.num_accepted)
        return DeviceOutput(jnp.concatenate(columns, axis=1), self.logprobs)


def decode(
    params: Params, kv_pages: KVCachePages, state: DeviceState, packed: jax.Array, *, model: StepModel, bucket: Bucket
) -> tuple[KVCachePages, DeviceState, DeviceOutput]:
    """Takes up to `bucket.width` decode steps, as many as the batch says, and stops when every row has ended.

    `kv_pages` and `state` are donated. Each row's position and input token come from `state`, and what it samples stays
    there, so a caller dispatches the next step before reading this one. A row that ends yields no more tokens. Inside
    shard_map each device has its share of `params` and `kv_pages`, and the same of everything else.

    In a bucket with drafts each step computes what the proposer guesses behind a row's last token, too. Then it samples
    position by position, each as it would have been sampled alone, while the draft there is what was sampled.
    """
    batch = unpack(packed, bucket, model.sizes)
    trash = _trash_slot(state)

    def alive(now: _Decoding) -> jax.Array:
        return _alive(now.state, batch.slots) & (now.counts < batch.max_new)

    def once(now: _Decoding) -> _Decoding:
        is_alive = alive(now)
        slots = jnp.where(is_alive, batch.slots, trash)
        lengths = now.state["length"][slots]
        starts = jnp.where(is_alive, lengths - 1, 0)
        tables = now.state["page_tables"][slots]
        last = now.state["history"][slots, starts]
        drafts = _drafts(now.state, slots, lengths, batch.max_new - now.counts, model, bucket)
        rows = RaggedRows.build(tables[:, 0], starts, jnp.where(is_alive, 1 + drafts.counts, 0), bucket.num_tokens)
        token_ids = last
        if bucket.num_drafts:
            place = jnp.arange(bucket.num_tokens) - rows.query_starts[rows.token_rows]
            tokens = jnp.concatenate([last[:, None], drafts.tokens], axis=1)
            token_ids = tokens[rows.token_rows, jnp.clip(place, 0, bucket.num_drafts)]
        hidden, kv_pages = _compute(params, now.kv_pages, token_ids, rows, tables, model)
        now = replace(now, num_steps=now.num_steps + 1, kv_pages=kv_pages)
        logits = project_logits(params, _share(model), hidden)
        if not bucket.num_drafts:
            return now.take(is_alive, *_sample(now.state, logits, slots, lengths, model))
        return _verify(now, logits, is_alive, drafts, rows.query_starts[:-1], slots, lengths, model)

    now = _Decoding.begin(kv_pages, _open_pages(state, batch), bucket, model.spec.vocab_size)
    if bucket.width == 1:
        now = once(now)
    else:
        now = jax.lax.while_loop(lambda now: (now.num_steps < batch.num_steps) & jnp.any(alive(now)), once, now)
    return now.kv_pages, now.state, now.output


def _drafts(
    state: DeviceState, slots: jax.Array, lengths: jax.Array, most: jax.Array, model: StepModel, bucket: Bucket
) -> Drafts:
    """What the proposer guesses for rows that may yield `most` i32[R] tokens more in this call."""
    if not bucket.num_drafts:
        return Drafts(jnp.zeros((bucket.num_rows, 0), jnp.int32), jnp.zeros(bucket.num_rows, jnp.int32))
    assert model.proposer is not None, "nobody proposes drafts"
    with jax.named_scope("propose"):
        drafts = model.proposer.propose(state, slots, lengths, bucket.num_drafts)
    # The token behind the last draft is sampled, too.
    room = jnp.minimum(most, state["limit"][slots] - lengths) - 1
    tokens = jnp.clip(drafts.tokens, 0, model.spec.vocab_size - 1)
    return Drafts(tokens, jnp.clip(drafts.counts, 0, jnp.maximum(room, 0)))


def _verify(
    now: _Decoding,
    logits: jax.Array,
    alive: jax.Array,
    drafts: Drafts,
    firsts: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    model: StepModel,
) -> _Decoding:
    """Samples behind each row's last token, logits[firsts[r]], and behind each draft that equals what was sampled.

    So each token is sampled from the same logits, with the same noise and the same state as without drafts.
    """
    num_drafts, trash = drafts.tokens.shape[1], _trash_slot(now.state)
    row = jnp.arange(len(slots))

    def at_next(carry: tuple[jax.Array, jax.Array, _Decoding]) -> tuple[jax.Array, jax.Array, _Decoding]:
        index, matches, now = carry
        at = jnp.where(matches, slots, trash)
        here = logits[jnp.clip(firsts + index, 0, len(logits) - 1)]
        state, tokens, best = _sample(now.state, here, at, lengths + index, model)
        now = now.take(matches, state, tokens, best)
        draft = jnp.minimum(index, num_drafts - 1)
        is_accepted = matches & (index < drafts.counts) & (drafts.tokens[:, draft] == tokens)
        now = replace(now, num_accepted=now.num_accepted.at[row, draft].add(is_accepted.astype(jnp.int32)))
        return index + 1, is_accepted & (state["is_over"][slots] == 0), now

    drafted = alive[:, None] & (jnp.arange(num_drafts) < drafts.counts[:, None])
    now = replace(now, num_drafted=now.num_drafted + drafted.astype(jnp.int32))
    carry = (jnp.int32(0), alive, now)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), at_next, carry)[2]


def forward(
    params: Params, kv_pages: KVCachePages, state: DeviceState, packed: jax.Array, *, model: StepModel, bucket: Bucket
) -> tuple[KVCachePages, DeviceState, Unsampled, PromptScores]:
    """Computes the tokens of a packed batch and writes their KV; the rest as `decode`."""
    batch = unpack(packed, bucket, model.sizes)
    state = _open_pages(state, batch)
    trash = _trash_slot(state)
    # A decode row that has ended computes something of the trash slot's: its place among the tokens is taken.
    is_over = batch.decodes & ~_alive(state, batch.slots)
    slots = jnp.where(is_over, trash, batch.slots)
    starts = jnp.where(batch.decodes, jnp.maximum(state["length"][slots] - 1, 0), batch.starts)
    tables = state["page_tables"][slots]
    rows = RaggedRows.build(tables[:, 0], starts, batch.lengths, bucket.num_tokens)
    is_decode = batch.decodes[rows.token_rows] & rows.is_real()
    token_ids = jnp.where(is_decode, state["history"][slots, starts][rows.token_rows], batch.token_ids)
    hidden, kv_pages = _compute(params, kv_pages, token_ids, rows, tables, model)
    with jax.named_scope("history"):
        history = state["history"]
        at = jnp.where(rows.is_real() & ~is_decode, slots[rows.token_rows], trash + 1)
        state = state | {"history": history.at[at, rows.positions].set(token_ids, mode="drop")}
    project = partial(project_logits, params, _share(model))
    best = score(hidden, batch, rows, project, model.spec.vocab_size, model.axis, model.sampling)
    scores = PromptScores(best, hidden if model.sampling.has_wide_scores else None)
    # A padding row's last token is whatever: nothing is sampled for the trash slot.
    last = jnp.clip(rows.query_starts[1:] - 1, 0)
    slots = jnp.where(batch.max_new > 0, slots, trash)
    return kv_pages, state, Unsampled(hidden[last], slots, starts + batch.lengths), scores


def sample_rows(
    head: Params, state: DeviceState, unsampled: Unsampled, *, model: StepModel
) -> tuple[DeviceState, DeviceOutput]:
    """Samples a token for every row that `forward` left. `state` is donated. `head`: what `project_logits` reads."""
    slots = unsampled.slots
    logits = project_logits(head, _share(model), unsampled.hidden)
    state, tokens, best = _sample(state, logits, slots, unsampled.positions, model)
    counts = (slots != _trash_slot(state)).astype(jnp.int32)
    yielded = jnp.stack([counts, tokens], axis=1)
    best = jax.tree.map(lambda x: x[None], best)
    # A mask is for one token: the row's next step may sample without.
    state = state | {IS_MASKED.name: state[IS_MASKED.name].at[slots].set(0)}
    return state, DeviceOutput(yielded, best)


def pick_rows(unsampled: Unsampled, index: jax.Array) -> Unsampled:
    """The rows `index` i32[N] of what `forward` left."""
    return jax.tree.map(lambda x: x[index], unsampled)


def distribute(head: Params, state: DeviceState, unsampled: Unsampled, *, model: StepModel) -> jax.Array:
    """What is reported of every token, f32[N, V], for N rows that are yet to be sampled."""
    logits = project_logits(head, _share(model), unsampled.hidden)
    rows, vocab_size = Rows(state, unsampled.slots), model.spec.vocab_size
    return distributions(logits, rows, unsampled.positions, vocab_size, model.axis, model.sampling)


def pick_tokens(hidden: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The hidden states f[SCORE_BATCH, E] of some of T tokens, and the tokens behind them, as `pack_wide` says."""
    tokens, following = packed
    return hidden[tokens], following


def score_widely(head: Params, hidden: jax.Array, token_ids: jax.Array, *, model: StepModel) -> DeviceLogprobs:
    """What is reported of `token_ids` i32[N] behind those with `hidden` f[N, E], and of as many as anybody may want."""
    logits = project_logits(head, _share(model), hidden)
    count = model.sampling.max_logprobs
    return token_logprobs(logits, token_ids, model.spec.vocab_size, model.axis, model.sampling, count)


def _compute(
    params: Params,
    kv_pages: KVCachePages,
    token_ids: jax.Array,
    rows: RaggedRows,
    tables: jax.Array,
    model: StepModel,
) -> tuple[jax.Array, KVCachePages]:
    """The hidden states [T, E] of `token_ids`, whose KV is in the pages then. `tables` i32[R, groups, max_pages]."""
    spec, backend, shard = model.spec, model.backend, _share(model)
    groups = model.shape.groups(spec)
    rows_of = [replace(rows, page_table=tables[:, number]) for number in range(len(groups))]
    plan_of = [
        plan_rows(rows, pages, num_heads=shard.num_heads, dtype=params["embed"].dtype, backend=backend)
        for rows, pages in zip(rows_of, kv_pages, strict=True)
    ]
    # A layer's group is known by its window, and its place in the group by its number, which may be a loop's.
    number_of = {spec.windows[layer]: number for number, group in enumerate(groups) for layer in group.layers}
    place_of = {layer: place for group in groups for place, layer in enumerate(group.layers)}
    places = np.array([place_of[layer] for layer in range(spec.num_layers)], np.int32)

    def attend(
        kv: KVCachePages, layer: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array | int
    ) -> tuple[jax.Array, KVCachePages]:
        number = 0
        if len(groups) > 1:
            assert isinstance(window, int), "where windows are read while the step runs, all layers are one group"
            number = number_of[None if window == NO_WINDOW else window]
            layer = jnp.asarray(places)[layer]
        out, pages = ragged_paged_attention(
            q,
            k,
            v,
            kv[number],
            layer,
            rows_of[number],
            scale=spec.attention_scale,
            soft_cap=spec.attention_soft_cap,
            window=window,
            plan=plan_of[number],
            backend=backend,
        )
        return out, (*kv[:number], pages, *kv[number + 1 :])

    return run_decoder(params, shard, token_ids, rows.positions, kv_pages, attend, model.axis)


def _sample(
    state: DeviceState, logits: jax.Array, slots: jax.Array, positions: jax.Array, model: StepModel
) -> tuple[DeviceState, jax.Array, DeviceLogprobs]:
    """The tokens i32[R] at `positions` of `slots`, which the state has as their last ones then."""
    with jax.named_scope("sample"):
        rows = Rows(state, slots)
        vocab_size, axis, options = model.spec.vocab_size, model.axis, model.sampling
        tokens = sample(logits, rows, positions, vocab_size, axis, options)
        best = logprobs(logits, tokens, rows, positions, vocab_size, axis, options)
        is_stop = jnp.any(rows["stop_ids"] == tokens[:, None], axis=1) & (positions >= rows["min_length"])
        at = jnp.where(slots == _trash_slot(state), len(state["length"]), slots)  # past all, so dropped
        progress = {
            "history": state["history"].at[at, positions].set(tokens, mode="drop"),
            "length": state["length"].at[at].set(positions + 1, mode="drop"),
            "is_over": state["is_over"].at[at].set(is_stop.astype(jnp.int32), mode="drop"),
        }
        return count_tokens(state, rows, tokens) | progress, tokens, best


def _share(model: StepModel) -> ModelSpec:
    """What one device computes of the model."""
    return Spread(model.spec, model.axis.size).shard


def _alive(state: DeviceState, slots: jax.Array) -> jax.Array:
    """bool[R]: decode rows with a token to come."""
    return (state["length"][slots] < state["limit"][slots]) & (state["is_over"][slots] == 0)


def _trash_slot(state: DeviceState) -> int:
    return len(state["length"]) - 1


def _open_pages(state: DeviceState, batch: Batch) -> DeviceState:
    """Enters the pages that rows open in this step into the page tables."""
    shape = state["page_tables"].shape
    tables = state["page_tables"].reshape(-1)
    for opened in batch.new_pages:
        at = jnp.where(opened.pages > 0, opened.at, tables.size)  # past all, so dropped
        tables = tables.at[at].set(opened.pages, mode="drop")
    return state | {"page_tables": tables.reshape(shape)}
