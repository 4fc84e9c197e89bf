"""The parts of every step program: a model on its devices, its forward pass over packed rows, and its sampler."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import begin_layers, embed_for_layers, embed_tokens, end_layers, final_norm, run_part
from jaxvllm.models.layer_input import Scalar
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.token_adapters import TokenAdapters
from jaxvllm.runtime.batch import Batch
from jaxvllm.runtime.cache_shape import CacheShape, KVCachePages
from jaxvllm.runtime.expert_choices import ChoiceShape
from jaxvllm.runtime.layer_cache import Kept, LayerCache, TakenIn
from jaxvllm.runtime.penalties import count_tokens
from jaxvllm.runtime.pipeline import NO_PIPELINE, OfTokens, Pipeline
from jaxvllm.runtime.row_blocks import by_blocks, rows_of_block
from jaxvllm.runtime.sampler import DEFAULT_OPTIONS, DeviceLogprobs, SamplerOptions, logprobs, sample
from jaxvllm.runtime.slot_fields import ADAPTER, DeviceState, Rows, SlotSizes
from jaxvllm.runtime.suffix_index import record
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.axis import ALONE, NO_OTHERS, ModelAxis, ReplicaAxis


@dataclass(frozen=True)
class StepModel:
    """The part of a step that no batch changes: the model, and the devices and kernels that compute it."""

    spec: ModelSpec
    shape: CacheShape
    backend: Backend
    axis: ModelAxis = ALONE
    replicas: ReplicaAxis = NO_OTHERS  # that run the step together
    sampling: SamplerOptions = DEFAULT_OPTIONS
    pipeline: Pipeline = NO_PIPELINE
    is_adapted: bool = False  # whether tokens have adapters

    @property
    def sizes(self) -> SlotSizes:
        return self.shape.sizes(self.spec)

    @property
    def shard(self) -> ModelSpec:
        """The share of each layer that one device computes."""
        return self._spread.shard

    @property
    def parts(self) -> Mapping[ModelSpec, tuple[int, ...]]:
        """The parts of `shard` that stages compute, each once, with the numbers of these stages."""
        parts: dict[ModelSpec, tuple[int, ...]] = {}
        for stage, part in enumerate(self._spread.parts):
            parts[part] = (*parts.get(part, ()), stage)
        return parts

    @property
    def first_layer(self) -> Scalar:
        """The number of the first layer of this device's stage."""
        if self.pipeline.stages.size == 1:
            return 0
        return jnp.asarray([own.start for own in self._spread.stage_layers], jnp.int32)[self.pipeline.stages.index]

    @property
    def _spread(self) -> Spread:
        computed = self.spec if self.is_adapted else self.spec.without_layer_rooms
        return Spread(computed, self.axis.size, self.pipeline.stages.size)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "token_ids", "hidden", "states", "taken", "loads", "choices", "adapters"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Computed:
    """The results of a forward pass for the T tokens of a step."""

    rows: RaggedRows
    token_ids: jax.Array  # i32[T]
    hidden: jax.Array  # f[T, E], after the final norm
    states: jax.Array  # f[N, T, E], after those layers that the proposer asks for
    taken: TakenIn = field(default_factory=dict)  # that the states of layers may still take in
    loads: jax.Array | None = None  # u32[L, X]: tokens that have chosen each expert, where they are counted
    choices: jax.Array | None = None  # [T, layers with experts, k]: the experts of each token, where they are told
    adapters: TokenAdapters | None = None  # of the tokens, if any has one


# What is added to a token in the output of a step with drafts, if it was one of them: a bit that no token id has.
DRAFT_MARK = 1 << 30


@partial(jax.tree_util.register_dataclass, data_fields=["yielded", "logprobs"], meta_fields=[])
@dataclass(frozen=True)
class DeviceOutput:
    """The yield of a step for its R rows."""

    # i32[R, 1 + Y + 2 K]: how many tokens, then the tokens, with DRAFT_MARK where they were drafts, then for each place
    # of a draft how often there was one, and how often it was accepted. One array, since each is a transfer.
    yielded: jax.Array
    logprobs: DeviceLogprobs  # [Y, R]


def compute(
    params: Params,
    kv_pages: KVCachePages,
    token_ids: jax.Array,
    rows: RaggedRows,
    tables: jax.Array,
    model: StepModel,
    depths: tuple[int, ...] = (),
    most_drafted: int | None = None,
    side_rows: jax.Array | None = None,
    is_read: jax.Array | None = None,
    adapters: jax.Array | None = None,
) -> tuple[Computed, KVCachePages]:
    """Computes `token_ids` i32[T], whose KV is in the pages then. `tables` i32[R, groups, max_pages].

    With `side_rows` [N, E], the token `-1 - r` is its row r. `is_read` bool[T] is False for tokens whose hidden states
    may be anything, since nobody reads them; None: all are read.
    With `most_drafted` all but the first token of a row are drafts, and no row has more tokens than that. `commit` then
    says how many of them count. `adapters` i32[R] are the slots of the rows' adapters; None: no row has one.
    """
    shard, num_groups = model.shard, model.sizes.num_groups
    own_pages, others = kv_pages[:num_groups], kv_pages[num_groups:]
    slots = None if adapters is None else adapters[rows.token_rows]
    token_adapters = None if slots is None else TokenAdapters.of(slots, shard.num_lora_slots, model.backend)
    x = embed_tokens(params, shard, token_ids, rows.positions, model.axis, side_rows, token_adapters)
    embeddings = embed_for_layers(params, shard, token_ids, x, model.axis)
    with_tables, is_cut = replace(rows, page_table=tables), model.pipeline.cuts_rows(rows)

    def cache_of(part: ModelSpec, rows: RaggedRows, pages: KVCachePages) -> LayerCache:
        return LayerCache(part, model.shape, rows, pages, x.dtype, model.backend, most_drafted, is_cut)

    first = model.first_layer
    told = ChoiceShape.of(model.spec) if model.sampling.tells_experts else None
    of_tokens = OfTokens(embeddings, slots)
    assert is_read is None or model.pipeline.stages.size == 1, "microbatches have other tokens"

    def run(
        part: ModelSpec, x: jax.Array, of_tokens: OfTokens, rows: RaggedRows, kept: Kept
    ) -> tuple[jax.Array, jax.Array, Kept]:
        slots = of_tokens.adapters
        own_adapters = None if slots is None else TokenAdapters.of(slots, shard.num_lora_slots, model.backend)
        cache = cache_of(part, rows, kept.pages)
        cache.make_plans()

        def count(kept: Kept, chosen: jax.Array, number: Scalar) -> Kept:
            if kept.loads is not None:
                kept = cache.count(kept, chosen, first + number)
            if told is not None:
                assert kept.choices is not None
                kept = kept._replace(choices=told.stored(kept.choices, chosen, number))
            return kept

        ways = cache.attend, model.axis, depths, of_tokens.embeddings, cache.recur, rows.is_real(), is_read
        counting = count if model.shape.counts_loads or told is not None else None
        x, states, kept = run_part(
            params, part, x, rows.positions, cache.without_choice(kept), *ways, counting, model.backend, own_adapters
        )
        return x, states, kept._replace(chosen=None)

    kept = cache_of(shard, with_tables, own_pages).begin
    if told is not None:
        kept = kept._replace(choices=told.zeros(len(token_ids)))
    x = begin_layers(params, shard, x)
    if model.pipeline.stages.size == 1:
        x, states, kept = run(shard, x, of_tokens, with_tables, kept)
    else:
        assert not depths, "a proposer that reads states after layers needs them all on one device"

        def run_stage(
            part: ModelSpec, of_tokens: OfTokens, rows: RaggedRows, before: tuple[jax.Array, Kept]
        ) -> tuple[jax.Array, Kept]:
            x, kept = before
            if of_tokens.embeddings is not None:
                own = jax.lax.dynamic_slice_in_dim(of_tokens.embeddings, first, part.num_layers)
                of_tokens = replace(of_tokens, embeddings=own)
            x, _, kept = run(part, x, of_tokens, rows, kept)
            return x, kept

        def layers(x: jax.Array, of_tokens: OfTokens, rows: RaggedRows, kept: Kept) -> tuple[jax.Array, Kept]:
            for part, stages in model.parts.items():
                x, kept = model.pipeline.only_on(stages, partial(run_stage, part, of_tokens, rows), (x, kept))
            return x, kept

        # Drafts of a row that states look ahead at stay together.
        x, kept = model.pipeline.compute(layers, x, of_tokens, with_tables, kept, model.axis, bool(kept.taken))
        states = jnp.zeros((0, *x.shape), x.dtype)
        if kept.loads is not None:
            kept = kept._replace(loads=model.pipeline.stages.sum(kept.loads))
    x = end_layers(params, shard, x)
    hidden = final_norm(params, shard, x)
    return Computed(rows, token_ids, hidden, states, kept.taken, kept.loads, kept.choices, token_adapters), (
        *kept.pages,
        *others,
    )


def commit(
    computed: Computed, kv_pages: KVCachePages, tables: jax.Array, counts: jax.Array, model: StepModel
) -> KVCachePages:
    """Lets states take in the first `counts` i32[R] tokens of each row that `compute` took for drafts."""
    num_groups, rows = model.sizes.num_groups, replace(computed.rows, page_table=tables)
    own_pages, others = kv_pages[:num_groups], kv_pages[num_groups:]

    def commit_part(part: ModelSpec, pages: KVCachePages) -> KVCachePages:
        cache = LayerCache(part, model.shape, rows, pages, computed.hidden.dtype, model.backend)
        return cache.commit(pages, computed.taken, counts)

    for part, stages in model.parts.items() if computed.taken else ():
        own_pages = model.pipeline.only_on(stages, partial(commit_part, part), own_pages)
    return (*own_pages, *others)


def draw(
    state: DeviceState,
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    model: StepModel,
    num_drafts: int = 0,
) -> tuple[jax.Array, DeviceLogprobs]:
    """Samples the tokens i32[N] at `positions` of `slots`, and returns them with what is reported of them.

    With `num_drafts` a position may be so many tokens after the row's last one: those between are in the history.
    """
    with jax.named_scope("sample"):
        vocab_size, axis, options = model.spec.vocab_size, model.axis, model.sampling

        def of_rows(logits: jax.Array, rows: Rows, positions: jax.Array) -> tuple[jax.Array, DeviceLogprobs]:
            tokens = sample(logits, rows, positions, vocab_size, axis, options)
            return tokens, logprobs(logits, tokens, rows, positions, vocab_size, axis, options)

        rows = Rows(state, slots, num_drafts)
        block = rows_of_block(logits.shape[1], axis.size, model.backend)
        return by_blocks(of_rows, logits, rows, positions, block)


def are_stops(state: DeviceState, tokens: jax.Array, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns bool[N]: whether rows end with `tokens` i32[N]."""
    rows = Rows(state, slots)
    return jnp.any(rows["stop_ids"] == tokens[:, None], axis=1) & (positions >= rows["min_length"])


def append(
    state: DeviceState,
    slots: jax.Array,
    lengths: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
    over: jax.Array,
    is_plain: bool = False,
) -> DeviceState:
    """Gives `slots` i32[R], with `lengths` i32[R], the first `counts[r]` of `tokens` i32[R, N].

    `over` bool[R]: whether the last of these ends the row. The trash slot stays as it is. With `is_plain` no row has
    penalties, for which tokens are counted.
    """
    trash, places = trash_slot(state), jnp.arange(tokens.shape[1])
    at = jnp.where((slots == trash) | (counts == 0), trash + 1, slots)  # past all, so dropped
    each = jnp.where(places < counts[:, None], at[:, None], trash + 1)
    state = record(state, each, lengths[:, None] + places, tokens)
    if not is_plain:
        state = count_tokens(state, slots, tokens, counts)
    return state | {
        "length": state["length"].at[at].set(lengths + counts, mode="drop"),
        "is_over": state["is_over"].at[at].set(over.astype(jnp.int32), mode="drop"),
    }


def adapters_of(state: DeviceState, slots: jax.Array, model: StepModel) -> jax.Array | None:
    """Returns the slots i32[R] of the adapters of rows, or None where no row of the step has one."""
    return Rows(state, slots)[ADAPTER.name] if model.is_adapted else None


def are_alive(state: DeviceState, slots: jax.Array) -> jax.Array:
    """Returns bool[R]: which decode rows have a token to come."""
    rows = Rows(state, slots)
    return (rows["length"] < rows["limit"]) & (rows["is_over"] == 0)


def trash_slot(state: DeviceState) -> int:
    return len(state["length"]) - 1


def open_pages(state: DeviceState, batch: Batch) -> DeviceState:
    """Enters the pages that rows open in this step into the page tables."""
    shape = state["page_tables"].shape
    tables = state["page_tables"].reshape(-1)
    for opened in batch.new_pages:
        at = jnp.where(opened.pages > 0, opened.at, tables.size)  # past all, so dropped
        tables = tables.at[at].set(opened.pages, mode="drop")
    return state | {"page_tables": tables.reshape(shape)}
