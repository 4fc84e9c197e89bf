"""The step where prompts are computed, or a row waits for the host: pure functions from a packed batch to tokens.

tokens -> decoder (writes and reads pages) -> last hidden of each row -> logits -> sampled tokens -> state

It is two programs: `forward`, then `sample_rows`, which is compiled once a row count and not once a bucket. Where all
rows decode and none waits, the step is `decoding.decode`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import for_head, project_logits
from jaxvllm.models.params import Params
from jaxvllm.runtime.batch import Batch, unpack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import KVCachePages
from jaxvllm.runtime.expert_loads import with_loads
from jaxvllm.runtime.proposers import Proposer, SeenStep
from jaxvllm.runtime.readouts.readout import Readable, Unsampled
from jaxvllm.runtime.side_rows import SIDE_ROWS, known_tokens
from jaxvllm.runtime.slot_fields import DeviceState
from jaxvllm.runtime.step_model import (
    DeviceOutput,
    StepModel,
    adapters_of,
    append,
    are_alive,
    are_stops,
    compute,
    draw,
    open_pages,
    trash_slot,
)
from jaxvllm.runtime.suffix_index import record
from jaxvllm.runtime.token_mask import IS_MASKED
from pallas_kernels.ragged_paged_attention import RaggedRows


def forward(
    params: Params,
    kv_pages: KVCachePages,
    state: DeviceState,
    packed: jax.Array,
    *,
    model: StepModel,
    bucket: Bucket,
    proposer: Proposer | None = None,
) -> tuple[KVCachePages, DeviceState, Unsampled, Readable]:
    """Computes the tokens of a packed batch and writes their KV. `kv_pages` and `state` are donated.

    A `proposer` sees them, so that it can guess what comes after these tokens.
    Inside shard_map each device has its share of `params` and `kv_pages`, and the same of everything else.
    """
    batch = unpack(packed, bucket, model.sizes)
    state = open_pages(state, batch)
    trash = trash_slot(state)
    # A decode row that has ended computes something of the trash slot's: its place among the tokens is taken.
    is_over = batch.decodes & ~are_alive(state, batch.slots)
    slots = jnp.where(is_over, trash, batch.slots)
    starts = jnp.where(batch.decodes, jnp.maximum(state["length"][slots] - 1, 0), batch.starts)
    tables = state["page_tables"][slots]
    rows = RaggedRows.build(tables[:, 0], starts, batch.lengths, bucket.num_tokens)
    is_decode = batch.decodes[rows.token_rows] & rows.is_real()
    token_ids = jnp.where(is_decode, state["history"][slots, starts][rows.token_rows], batch.token_ids)
    depths = () if proposer is None else proposer.depths
    # Proposers and pooled prompts read all tokens, loads count the choices of all, and these may be told. Microbatches
    # of stages have tokens of their own.
    reads_all = (
        proposer is not None
        or model.sampling.sums_prompts
        or model.shape.counts_loads
        or model.sampling.tells_experts
        or model.pipeline.stages.size > 1
    )
    is_read = None if reads_all else _are_read(batch, rows)
    ways = depths, None, state.get(SIDE_ROWS), is_read, adapters_of(state, slots, model)
    computed, kv_pages = compute(params, kv_pages, token_ids, rows, tables, model, *ways)
    hidden, state = computed.hidden, with_loads(state, computed.loads)
    if proposer is not None:
        with jax.named_scope("see"):
            step = SeenStep(params, kv_pages, state, slots, model, computed, batch.lengths)
            kv_pages, state = proposer.see(step)
    with jax.named_scope("history"):
        at = jnp.where(rows.is_real() & ~is_decode, slots[rows.token_rows], trash + 1)
        state = record(state, at, rows.positions, known_tokens(state, token_ids))
    hidden = for_head(params, model.shard, hidden, computed.adapters)
    # A padding row's last token is whatever: nothing is sampled for the trash slot.
    last = jnp.clip(rows.query_starts[1:] - 1, 0)
    slots = jnp.where(batch.max_new > 0, slots, trash)
    unsampled = Unsampled(hidden[last], slots, starts + batch.lengths)
    return kv_pages, state, unsampled, Readable(hidden, computed.choices)


def _are_read(batch: Batch, rows: RaggedRows) -> jax.Array:
    """Returns bool[T]: which tokens are sampled from, or scored: of most prompts only the last one of the step."""
    tokens = jnp.arange(len(rows.token_rows))
    is_last = tokens + 1 == rows.query_starts[1:][rows.token_rows]
    return is_last | batch.is_scored[rows.token_rows]


def sample_rows(
    head: Params, state: DeviceState, unsampled: Unsampled, *, model: StepModel
) -> tuple[DeviceState, DeviceOutput]:
    """Samples a token for every row that `forward` left. `state` is donated. `head`: what `project_logits` reads."""
    slots = unsampled.slots
    logits = project_logits(head, model.shard, unsampled.hidden)
    tokens, best = draw(state, logits, slots, unsampled.positions, model)
    is_over = are_stops(state, tokens, slots, unsampled.positions)
    counts = (slots != trash_slot(state)).astype(jnp.int32)
    is_plain = model.sampling.is_plain
    state = append(state, slots, unsampled.positions, tokens[:, None], counts, is_over, is_plain)
    yielded = jnp.stack([counts, tokens], axis=1)
    best = jax.tree.map(lambda x: x[None], best)
    if not is_plain:  # a mask is for one token: the row's next step may sample without
        state = state | {IS_MASKED.name: state[IS_MASKED.name].at[slots].set(0)}
    return state, DeviceOutput(yielded, best)


def sample_in_turn(
    head: Params, state: DeviceState, unsampled: Unsampled, turn: jax.Array, *, model: StepModel
) -> tuple[DeviceState, DeviceOutput]:
    """Does what `sample_rows` does, but in a replica whose `turn` i32[1] is 0: there no row is sampled.

    Its turn comes, or has come, in another call for the same rows.
    """
    slots = jnp.where(turn > 0, unsampled.slots, trash_slot(state))
    return sample_rows(head, state, replace(unsampled, slots=slots), model=model)
