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

    @property
    def sizes(self) -> SlotSizes:
        return self.shape.sizes(self.spec)


@partial(jax.tree_util.register_dataclass, data_fields=["yielded", "logprobs"], meta_fields=[])
@dataclass(frozen=True)
class DeviceOutput:
    """What a step yields for its R rows."""

    yielded: jax.Array  # i32[R, 1 + W]: how many tokens, then the tokens; one array, since each is a transfer
    logprobs: DeviceLogprobs  # [W, R]


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "slots", "positions"], meta_fields=[])
@dataclass(frozen=True)
class Unsampled:
    """What `forward` leaves for `sample_rows`, R rows."""

    hidden: jax.Array  # f[R, E], of each row's last token
    slots: jax.Array  # i32[R]; the trash slot where a row yields nothing
    positions: jax.Array  # i32[R], of the token to sample


def decode(
    params: Params, kv_pages: KVCachePages, state: DeviceState, packed: jax.Array, *, model: StepModel, bucket: Bucket
) -> tuple[KVCachePages, DeviceState, DeviceOutput]:
    """Takes up to `bucket.width` decode steps, as many as the batch says, and stops when every row has ended.

    `kv_pages` and `state` are donated. Each row's position and input token come from `state`, and what it samples stays
    there, so a caller dispatches the next step before reading this one. A row that ends yields no more tokens. Inside
    shard_map each device has its share of `params` and `kv_pages`, and the same of everything else.
    """
    batch = unpack(packed, bucket, model.sizes)
    state = _open_pages(state, batch)
    num_rows, width = bucket.num_rows, bucket.width
    best = DeviceLogprobs.zeros(num_rows, model.spec.vocab_size)
    best = jax.tree.map(lambda x: jnp.zeros((width, *x.shape), x.dtype), best)
    yielded = jnp.zeros((num_rows, 1 + width), jnp.int32)

    def goes_on(carry: tuple[jax.Array, KVCachePages, DeviceState, jax.Array, DeviceLogprobs]) -> jax.Array:
        index, _, state, _, _ = carry
        return (index < batch.width) & jnp.any(_alive(state, batch.slots))

    def once(
        carry: tuple[jax.Array, KVCachePages, DeviceState, jax.Array, DeviceLogprobs],
    ) -> tuple[jax.Array, KVCachePages, DeviceState, jax.Array, DeviceLogprobs]:
        index, kv_pages, state, yielded, best = carry
        alive = _alive(state, batch.slots)
        slots = jnp.where(alive, batch.slots, _trash_slot(state))
        lengths = state["length"][slots]
        starts = jnp.where(alive, lengths - 1, 0)
        tables = state["page_tables"][slots]
        rows = RaggedRows.build(tables[:, 0], starts, alive.astype(jnp.int32), num_rows)
        token_ids = state["history"][slots, starts]
        hidden, kv_pages = _compute(params, kv_pages, token_ids, rows, tables, model)
        state, tokens, now = _sample(params, state, hidden, slots, lengths, model)
        yielded = yielded.at[:, 0].add(alive.astype(jnp.int32)).at[:, 1 + index].set(tokens)
        best = jax.tree.map(lambda all_steps, step: all_steps.at[index].set(step), best, now)
        return index + 1, kv_pages, state, yielded, best

    carry = (jnp.int32(0), kv_pages, state, yielded, best)
    _, kv_pages, state, yielded, best = once(carry) if width == 1 else jax.lax.while_loop(goes_on, once, carry)
    return kv_pages, state, DeviceOutput(yielded, best)


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
    slots = jnp.where(batch.samples, slots, trash)
    return kv_pages, state, Unsampled(hidden[last], slots, starts + batch.lengths), scores


def sample_rows(
    head: Params, state: DeviceState, unsampled: Unsampled, *, model: StepModel
) -> tuple[DeviceState, DeviceOutput]:
    """Samples a token for every row that `forward` left. `state` is donated. `head`: what `project_logits` reads."""
    slots = unsampled.slots
    state, tokens, best = _sample(head, state, unsampled.hidden, slots, unsampled.positions, model)
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
    head: Params,
    state: DeviceState,
    hidden: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    model: StepModel,
) -> tuple[DeviceState, jax.Array, DeviceLogprobs]:
    """The tokens i32[R] at `positions` of `slots`, which the state has as their last ones then."""
    with jax.named_scope("sample"):
        logits = project_logits(head, _share(model), hidden)
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
