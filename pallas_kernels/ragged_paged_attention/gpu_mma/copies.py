"""Copies blocks of KV to shared memory while earlier ones are computed, for each generation of GPUs in its way.

tma       (compute capability 9.0 and later)  an engine copies, and arrives at a barrier
cp.async  (8.0 to 8.9)                        each thread copies 16 bytes at a time, and waits for its own copies
loads     (7.5)                               threads load into registers, wait, and store

The interpreter runs the first in place of the second (`copy_unit_of`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import LANES, CopyUnit, Ref, barriers, swizzled
from pallas_kernels.ragged_paged_attention.gpu.pieces import Piece
from pallas_kernels.ragged_paged_attention.gpu.tile import AttentionBuild

# A layout of any multiple of eight numbers, which all warps have.
FEW = plgpu.Layout.WGMMA.reduce(0)


def stages_memory(attention: AttentionBuild) -> dict[str, Any]:
    """Returns the shared memory of `BlockCopies`, but for its barriers."""
    memory = {"blocks": swizzled((attention.stages, attention.block, attention.row_size), attention.kv_dtype)}
    if attention.num_scales:
        memory["block_scales"] = plgpu.SMEM((attention.stage_scales, attention.block), jnp.float32)
    return memory


def copy_barriers(attention: AttentionBuild, unit: CopyUnit) -> dict[str, Any]:
    """Returns the barriers of `BlockCopies`, one for each stage."""
    copies = attention.block // attention.copy_tokens
    return {"block_here": barriers(copies, attention.stages)} if unit == "tma" else {}


@dataclass(frozen=True)
class BlockCopies:
    """The copies of a piece's blocks, each into the stage of its number. A page is read once, and only if some of it is
    seen."""

    attention: AttentionBuild
    unit: CopyUnit
    kv: Ref  # f[L * P * K, S, row size]
    scales: Ref  # f32[L * P * K * N, S] of tokens, if they have some
    table: Ref  # i32[R, max_pages]
    layer: jax.Array
    piece: Piece
    memory: dict[str, Ref]  # of `stages_memory` and `copy_barriers`

    @property
    def num_copies(self) -> int:
        """The number of copies of a whole block."""
        return self.attention.block // self.attention.copy_tokens

    def stage(self, block: jax.Array) -> Ref:
        """Returns where the keys and values of a block are, after `wait`."""
        return self.memory["blocks"].at[self._stage_number(block)]

    def scales_of(self, block: jax.Array, number: int) -> Ref | None:
        """Returns the scales f32[B] of the keys (number 0) or the values (1) of a block, if tokens have some."""
        if not self.attention.num_scales:
            return None
        return self.memory["block_scales"].at[self._stage_number(block) * self.attention.num_scales + number]

    def start_first(self) -> None:
        """Starts the copies of as many blocks as there are stages."""
        for ahead in range(self.attention.stages):
            self._start_if_any(self.piece.begin + ahead)

    def start_next(self, block: jax.Array) -> None:
        """Starts the copies of the block that takes the stage of `block`, which all threads have read."""
        if self.unit == "tma":
            plgpu.commit_smem()  # ordinary reads and writes must be over before the engine writes
        self._start_if_any(block + self.attention.stages)

    def wait(self, block: jax.Array) -> None:
        """Waits for the copies of a block, which is the next one of those that were started."""
        if self.unit == "tma":
            plgpu.barrier_wait(self.memory["block_here"].at[self._stage_number(block)])
        if self.unit != "cp.async":
            return
        # An instruction waits until a number of copies, known when compiling, are left: those of later blocks.
        ahead = jnp.minimum(block + self.attention.stages, self.piece.end)
        left = self._copies_before(ahead) - self._copies_before(block + 1)
        for count in range(self.num_copies * (self.attention.stages - 1) + 1):
            pl.when(left == count)(partial(plgpu.wait_gmem_to_smem, count))

    def _stage_number(self, block: jax.Array) -> jax.Array:
        return lax.rem(block, self.attention.stages)

    def _copies_before(self, block: jax.Array) -> jax.Array:
        """Returns the number of copies of all blocks before this one, if the first one is whole."""
        tokens = self.attention.copy_tokens
        return jnp.minimum(block * self.num_copies, lax.div(self.piece.kv_len + tokens - 1, tokens))

    def _start_if_any(self, block: jax.Array) -> None:
        pl.when(block < self.piece.end)(partial(self._start, block))

    def _start(self, block: jax.Array) -> None:
        for index in range(self.num_copies):
            first = block * self.attention.block + index * self.attention.copy_tokens
            copy = partial(self._copy, block, index, first)
            if self.num_copies == 1:
                copy()
                continue
            is_seen = (first < self.piece.kv_len) & (first + self.attention.copy_tokens > self.piece.seen)
            pl.when(is_seen)(copy)
            if self.unit == "tma":
                here = self.memory["block_here"].at[self._stage_number(block)]
                pl.when(jnp.logical_not(is_seen))(partial(plgpu.barrier_arrive, here))

    def _copy(self, block: jax.Array, index: int, first: jax.Array) -> None:
        attention, tokens = self.attention, self.attention.copy_tokens
        page = self.table[self.piece.row, lax.div(first, attention.page_size)]
        slab = (self.layer * attention.num_pages + page) * attention.num_kv_heads + self.piece.head
        offset = lax.rem(first, attention.page_size) if attention.page_size > attention.block else 0
        source = self.kv.at[slab, pl.ds(offset, tokens)]
        into = self.stage(block).at[pl.ds(index * tokens, tokens)]
        match self.unit:
            case "tma":
                plgpu.copy_gmem_to_smem(source, into, self.memory["block_here"].at[self._stage_number(block)])
            case "cp.async":
                plgpu.copy_gmem_to_smem(source, into, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
            case "loads":  # 16 bytes of a thread at a time, too
                swizzle = LANES * attention.kv_dtype.itemsize
                layout = plgpu.Layout.SMEM_GMEM_COPY((tokens, attention.row_size), attention.kv_dtype, swizzle)
                into[...] = plgpu.load(source, layout=layout, optimized=False)
        for number in range(attention.num_scales):
            # They are few: cp.async copies 512 bytes or more, of which every thread has four.
            own = self.scales.at[slab * attention.num_scales + number, pl.ds(offset, tokens)]
            scales = self.scales_of(block, number)
            assert scales is not None
            scales[pl.ds(index * tokens, tokens)] = plgpu.load(own, layout=FEW, optimized=False)
