"""`GpuStates`: lets states that are matrices take tokens in by the kernels for NVIDIA GPUs.

The convolution, and what a recurrence understands of its result, are plain XLA for all tokens of a step at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import StateMemory, Token
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip
from pallas_kernels.ragged_paged_attention import RaggedRows

if TYPE_CHECKING:
    from pallas_kernels.linear_attention.gpu import ChunkPlan, ChunkUnit, StatePlan, StateTile, StateTokens

# By chunks in steps for so many tokens. What XLA prepares for chunks costs more than they gain in shorter ones: a layer
# of Qwen3-Next takes 352 us of an H100 by chunks for a prompt of 512 tokens and 311 token by token, and 1,148 and 1,311
# for 2,048 (benchmarks/results/h100-2026-11-26-0546cae.json). Several prompts, and other rules, were not measured.
CHUNKED_STEP = 1024

type MatrixRecurrence = GatedDelta | ChannelDelta | SelectiveScan


class GpuStatesPlan(NamedTuple):
    """The plan of a step: some rows are taken in token by token, and others by chunks."""

    rows: RaggedRows
    tokens: "StatePlan"
    chunks: "ChunkPlan | None"  # None: the step has too few tokens, or chunks are not for such matrices


@dataclass(frozen=True)
class GpuStates:
    """The states of a memory whose heads keep matrices in rows of a page, and then the window of the convolution."""

    conv: CausalConv
    recurrence: MatrixRecurrence
    chip: GpuChip
    interpret: bool

    @classmethod
    def of(cls, memory: StateMemory, backend: Backend) -> Self | None:
        """Returns those of `memory`, or None where the kernel does not take its matrices, or is not for this chip."""
        if not isinstance(backend.chip, GpuChip) or not backend.chip.has_copy_engine:
            return None
        match memory.rule:
            case RecurrentRule(CausalConv() as conv, GatedDelta() | ChannelDelta() | SelectiveScan() as recurrence):
                states = cls(conv, recurrence, backend.chip, backend.interpret)
                takes = all(states.tile(decode_only) is not None for decode_only in (True, False))
                return states if takes and memory.width == states.matrix[1] else None
        return None

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of a head's matrix."""
        rows, columns = self.recurrence.parts[0][-2:]
        return rows, columns

    def tile(self, decode_only: bool) -> "StateTile | None":
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.linear_attention.gpu import choose_tile

        return choose_tile(self.matrix, keys_last=self._keys_last, decode_only=decode_only)

    @property
    def chunk_unit(self) -> "ChunkUnit | None":
        from pallas_kernels.linear_attention.gpu import choose_chunks

        of_rule: dict[str, Any] = {"keys_last": self._keys_last, "corrects": self._corrects}
        return choose_chunks(self.matrix, **of_rule, chip=self.chip, interpret=self.interpret)

    @property
    def _keys_last(self) -> bool:
        return isinstance(self.recurrence, SelectiveScan)

    @property
    def _corrects(self) -> bool:
        return not isinstance(self.recurrence, SelectiveScan)

    def plan(self, rows: RaggedRows, page_size: int) -> GpuStatesPlan:
        """Makes what all layers of a step share."""
        if rows.decode_only or len(rows.token_rows) < CHUNKED_STEP or self.chunk_unit is None:
            return self.token_plan(rows, page_size)
        return self.chunk_plan(rows, page_size)

    def token_plan(self, rows: RaggedRows, page_size: int) -> GpuStatesPlan:
        """Makes the plan by which all rows go token by token."""
        from pallas_kernels.linear_attention.gpu import plan_states

        return GpuStatesPlan(rows, plan_states(rows, page_size), None)

    def chunk_plan(self, rows: RaggedRows, page_size: int) -> GpuStatesPlan:
        """Makes the plan by which rows of more than a few tokens go by chunks, where `chunk_unit` is one."""
        from pallas_kernels.linear_attention.gpu import FEW_TOKENS, plan_chunks, plan_states

        by_chunks = rows.query_lens() > FEW_TOKENS
        return GpuStatesPlan(rows, plan_states(rows, page_size, ~by_chunks), plan_chunks(rows, page_size, by_chunks))

    def __call__(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        plan: GpuStatesPlan,
        weights: Mapping[str, jax.Array],
        tokens: Token,
    ) -> tuple[jax.Array, jax.Array]:
        """Implements `StateKernel`, and reads zeros for padding."""
        from pallas_kernels.linear_attention.gpu import take_chunks, take_tokens

        (rows, of_tokens, chunks), channels = plan, tokens[CHANNELS].astype(jnp.float32)
        heads = self.recurrence.parts[0][0] if len(self.recurrence.parts[0]) == 3 else 1
        num_rows = heads * self.matrix[0]
        windows = self._windows(pages, place, of_tokens.rows[:, 3], num_rows)
        seen = partial(self.conv.seen_in, rows, windows, channels)
        mixed = self.conv.take_seen(weights, seen(jnp.arange(len(channels), dtype=jnp.int32)))
        of_heads = jax.vmap(self.recurrence.understand)
        understood = jax.vmap(of_heads, (None, 0, 0))(weights, mixed, tokens)

        def rest(lasts: jax.Array) -> jax.Array:
            """Returns what pages get beside the matrices after tokens i32[N]: their windows, f32[N, K, rows, W]."""
            ends = jnp.moveaxis(seen(lasts)[:, 1:], 1, 2)  # [N, K, size - 1, C]
            flat = ends.reshape(*ends.shape[:2], -1)
            room = (pages.shape[3] - num_rows) * pages.shape[4]
            flat = jnp.pad(flat, ((0, 0), (0, 0), (0, room - flat.shape[2])))
            return flat.reshape(*flat.shape[:2], -1, pages.shape[4])

        state_tokens, tile = self._state_tokens(understood), self.tile(rows.decode_only)
        rest_of_chunks = None if chunks is None else rest(chunks.lasts())
        assert tile is not None
        read, pages = take_tokens(
            pages,
            place,
            of_tokens,
            state_tokens,
            rest(of_tokens.windows_end()),
            tile=tile,
            corrects=self._corrects,
            interpret=self.interpret,
        )
        if chunks is not None:
            unit = self.chunk_unit
            assert unit is not None and rest_of_chunks is not None
            read, pages = take_chunks(
                pages, read, place, chunks, state_tokens, rest_of_chunks, unit=unit, chip=self.chip
            )
        if isinstance(self.recurrence, SelectiveScan):
            read = read + understood["skipped"]
        read = jnp.where(rows.is_real()[:, None, None, None], read, 0.0)
        return (read[:, :, 0] if isinstance(self.recurrence, ChannelDelta) else read), pages

    def _windows(self, pages: jax.Array, place: jax.Array | int, before: jax.Array, num_rows: int) -> jax.Array:
        """Returns the windows f32[R, K, size - 1, C] in the pages `before` i32[R], zeros for -1.

        They follow the first `num_rows` of a page.
        """
        _, _, K, S, W = pages.shape

        def one(page: jax.Array) -> jax.Array:
            begin = place, jnp.maximum(page, 0), 0, num_rows, 0
            return lax.dynamic_slice(pages, begin, (1, 1, K, S - num_rows, W)).reshape(K, -1)

        size, channels = self.conv.window
        # Without the barrier XLA may read pages again after the kernel, and so copy all of them before it: 346 MB
        # for 16 rows of a group of 16 heads, 80 by 128 (compiled for H100).
        found = lax.optimization_barrier(jax.vmap(one)(before))
        found = found[..., : size * channels].reshape(len(before), K, size, channels)
        return jnp.where((before >= 0)[:, None, None, None], found, 0.0)

    def _state_tokens(self, understood: Token) -> "StateTokens":
        """Returns what the kernel needs of tokens that are understood, [T, K, ..]."""
        from pallas_kernels.linear_attention.gpu import StateTokens

        logs = understood["g"]
        match self.recurrence:
            case SelectiveScan():
                queries, keys, values = understood["c"], understood["b"], understood["dx"]
                logs, betas = logs[..., None], jnp.ones_like(logs)
            case ChannelDelta():
                queries, keys, values = understood["q"], understood["k"], understood["v"][..., None, :]
                logs, betas = logs[..., None, :], understood["beta"][..., None]
            case GatedDelta():
                queries, keys, values = understood["q"], understood["k"], understood["v"]
                logs, betas = logs[..., None], understood["beta"]
        return StateTokens(queries, keys, values, logs, betas)
