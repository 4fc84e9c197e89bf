"""The step: one pure function from a packed batch to one token a row. The heart of the engine.

tokens -> decoder (writes and reads pages) -> last hidden of each row -> logits -> sampled tokens -> state
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxvllm.models.decoder import forward, project_logits
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.batch import Batch, unpack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.prompt_scores import score
from jaxvllm.runtime.sampler import DeviceLogprobs, logprobs, sample
from jaxvllm.runtime.state import DeviceState
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import KVPages, RaggedRows, plan_rows, ragged_paged_attention
from sharding.axis import ALONE, ModelAxis


@partial(jax.tree_util.register_dataclass, data_fields=["token_ids", "logprobs", "scores"], meta_fields=[])
@dataclass(frozen=True)
class DeviceOutput:
    """What a step yields for its R rows; only rows that `sample` mean something."""

    token_ids: jax.Array  # i32[R]
    logprobs: DeviceLogprobs  # of R rows
    scores: DeviceLogprobs | None  # of T tokens; None in a decode bucket, which has no prompts


def step(
    params: Params,
    kv_pages: KVPages,
    state: DeviceState,
    packed: jax.Array,
    *,
    spec: ModelSpec,
    bucket: Bucket,
    page_size: int,
    backend: Backend,
    axis: ModelAxis = ALONE,
) -> tuple[KVPages, DeviceState, DeviceOutput]:
    """Computes the tokens of a packed batch, writes their KV, and samples. `kv_pages` and `state` are donated.

    Sampled tokens stay in `state` as the next step's inputs, so a caller dispatches that step before reading these.
    Inside shard_map each device has its share of `params` and `kv_pages`, and the same of everything else.
    """
    shard = Spread(spec, axis.size).shard
    batch = unpack(packed, bucket)
    state = _open_pages(state, batch, page_size)
    rows = RaggedRows.build(state.page_table[batch.slots], batch.starts, batch.lengths, bucket.num_tokens)
    token_ids = _input_tokens(state, batch, rows)
    dtype = params["embed"].dtype
    plan = plan_rows(rows, kv_pages, num_heads=shard.num_heads, dtype=dtype, backend=backend)

    def attend(
        kv: KVPages, layer: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array | int
    ) -> tuple[jax.Array, KVPages]:
        return ragged_paged_attention(
            q,
            k,
            v,
            kv,
            layer,
            rows,
            scale=spec.attention_scale,
            soft_cap=spec.attention_soft_cap,
            window=window,
            plan=plan,
            backend=backend,
        )

    hidden, kv_pages = forward(params, shard, token_ids, rows.positions, kv_pages, attend, axis)
    with jax.named_scope("sample"):
        # A padding row's last token is whatever: its output goes to the trash slot.
        last = jnp.clip(rows.query_starts[1:] - 1, 0)
        project = partial(project_logits, params, shard)
        logits = project(hidden if bucket.is_decode else hidden[last])
        sampling = state.sampling.take(batch.slots)
        sampled = sample(logits, sampling, batch.starts + batch.lengths, spec.vocab_size, axis)
        best = logprobs(logits, sampled, sampling, spec.vocab_size, axis)
        at = jnp.where(batch.samples, batch.slots, state.trash_slot)
        state = replace(state, last_token=state.last_token.at[at].set(sampled))
    scores = None if bucket.is_decode else score(hidden, batch, rows, project, spec.vocab_size, axis)
    return kv_pages, state, DeviceOutput(sampled, best, scores)


def _open_pages(state: DeviceState, batch: Batch, page_size: int) -> DeviceState:
    """Enters the pages that decode rows open in this step into the page table."""
    at = jnp.where(batch.new_pages > 0, batch.slots, state.trash_slot)
    return replace(state, page_table=state.page_table.at[at, batch.starts // page_size].set(batch.new_pages))


def _input_tokens(state: DeviceState, batch: Batch, rows: RaggedRows) -> jax.Array:
    """i32[T]: prefill tokens from the batch, decode tokens from where the last step left them."""
    last = state.last_token[batch.slots]
    if rows.decode_only:
        return last
    return jnp.where(batch.decodes[rows.token_rows] & rows.is_real(), last[rows.token_rows], batch.token_ids)
