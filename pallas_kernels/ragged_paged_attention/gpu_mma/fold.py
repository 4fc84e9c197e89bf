"""The work of a warpgroup on a piece of a row's KV: its queries' online softmax, block after block.

Both products take their operands from registers. Keys and values come from shared memory in the order in which the
instruction wants them (ldmatrix); the weights go by way of shared memory, because each of the warps that share a row
needs all of its columns.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import LANES, WARP_ROWS, Ref, swizzled
from pallas_kernels.ragged_paged_attention.gpu.pieces import Piece
from pallas_kernels.ragged_paged_attention.gpu.tile import AttentionBuild, Softmax
from pallas_kernels.ragged_paged_attention.gpu_mma.codes import decoded
from pallas_kernels.ragged_paged_attention.gpu_mma.copies import BlockCopies, stages_memory

DEPTH = 16  # the inputs of one instruction in 16 bits
# The shared memory in which warps that share rows exchange maxima and sums: two numbers of each thread at a time, which
# are all that a thread has where four warps share 16 rows.
REDUCTION_BYTES = 1024

type QueryParts = tuple[jax.Array, ...]  # f[M, 64] each


def fold_memory(attention: AttentionBuild) -> dict[str, Any]:
    """Returns the shared memory of `PieceFold`, but for the barriers of its copies."""
    lanes = min(attention.block, LANES)
    memory = {
        **stages_memory(attention),
        "weights": swizzled((attention.rows, attention.block), attention.dtype, lanes),
    }
    if attention.converts:
        memory["converted"] = swizzled((attention.block, attention.head_size), attention.dtype)
    return memory


@dataclass(frozen=True)
class PieceFold:
    """The online softmax of a piece's queries over its blocks."""

    attention: AttentionBuild
    copies: BlockCopies
    slope_rows: Ref
    has_float8: bool  # whether the hardware converts float8

    def __call__(self, q: Ref) -> Softmax:
        """Returns the softmax of the queries of q f[K, T * G and more, D]."""
        self.copies.start_first()
        queries = self._load_queries(q)

        def fold_block(block: jax.Array, softmax: Softmax) -> Softmax:
            softmax = self._fold_block(queries, block, softmax)
            self.copies.start_next(block)
            return softmax

        return lax.fori_loop(self._piece.begin, self._piece.end, fold_block, self.attention.start())

    @property
    def _piece(self) -> Piece:
        return self.copies.piece

    @property
    def _warps(self) -> int:
        """The number of warps that have different rows of a tile."""
        return self.attention.rows // WARP_ROWS

    def _load_queries(self, q: Ref) -> QueryParts:
        attention = self.attention
        rows = pl.ds(self._piece.token * attention.group, attention.rows)
        layout = plgpu.Layout.MMA_LHS(attention.dtype, m_warps=self._warps)
        parts = (q.at[self._piece.head, rows, pl.ds(column, LANES)] for column in range(0, attention.head_size, LANES))
        return tuple(plgpu.load(part, layout=layout, optimized=False) for part in parts)

    def _fold_block(self, queries: QueryParts, block: jax.Array, softmax: Softmax) -> Softmax:
        attention, piece, weights_here = self.attention, self._piece, self.copies.memory["weights"]
        self.copies.wait(block)
        kv, first = self.copies.stage(block), block * attention.block
        position = piece.kv_len - piece.queries
        products = self._multiply_keys(queries, self._half(kv, 0))
        products = attention.scale_columns(products, self.copies.scales_of(block, 0))
        logits = attention.lean(attention.logits(products), self.slope_rows, piece.head, first, position)
        logits = attention.mask(logits, first, position, piece.window)
        weights, (summed, peak, total) = attention.fold(logits, softmax)
        of_values = self.copies.scales_of(block, 1)
        weights = attention.scale_seen(weights, of_values, first, piece.seen, piece.kv_len)
        weights_here[...] = weights.astype(attention.dtype)
        values = self._half(kv, 1)

        @pl.when((first < piece.seen) | (first + attention.block > piece.kv_len))
        def _() -> None:
            self._zero_unseen(values, first)

        return self._multiply_values(summed, weights_here, values), peak, total

    def _half(self, kv: Ref, half: int) -> Ref:
        """Returns the keys (half 0) or values of a block, in the queries' dtype. The values take the keys' place."""
        attention = self.attention
        stored = kv.at[:, pl.ds(half * attention.head_size, attention.head_size)]
        if not attention.converts:
            return stored
        converted = self.copies.memory["converted"]
        # A thread stores 16 bytes at a time, of eight codes that it loads.
        swizzle = LANES * attention.dtype.itemsize
        layout = plgpu.Layout.SMEM_GMEM_COPY((attention.block, attention.head_size), attention.dtype, swizzle)
        codes = plgpu.load(stored, layout=layout, optimized=False)
        converted[...] = decoded(codes, attention.dtype, self.has_float8)
        return converted

    def _multiply_keys(self, queries: QueryParts, keys: Ref) -> jax.Array:
        """Multiplies queries by keys [B, D]: f32[M, B]."""
        attention = self.attention
        products = jnp.zeros((attention.rows, attention.block), jnp.float32)
        products = plgpu.layout_cast(products, attention.layout)
        for part, column in zip(queries, range(0, attention.head_size, LANES), strict=True):
            products = self._mma(products, part, keys.at[:, pl.ds(column, LANES)].transpose((1, 0)))
        return products

    def _multiply_values(self, summed: jax.Array, weights: Ref, values: Ref) -> jax.Array:
        """Computes summed f32[M, D] + weights [M, B] @ values [B, D]."""
        attention = self.attention
        lanes = min(attention.block, LANES)
        layout = plgpu.Layout.MMA_LHS(attention.dtype, m_warps=self._warps)
        for column in range(0, attention.block, lanes):
            part = plgpu.load(weights.at[:, pl.ds(column, lanes)], layout=layout, optimized=False)
            for row in range(0, lanes, DEPTH):
                b = values.at[pl.ds(column + row, DEPTH)]
                summed = self._mma(summed, part[:, row : row + DEPTH], b)
        return summed

    def _mma(self, acc: jax.Array, a: jax.Array, b: Ref) -> jax.Array:
        """Computes acc f32[M, N] + a [M, I] @ b [I, N]."""
        if self.attention.interpret:
            return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        layout = plgpu.Layout.MMA_RHS(self.attention.dtype, m_warps=self._warps)
        return plgpu.mma(acc, a, plgpu.load(b, layout=layout, optimized=False))

    def _zero_unseen(self, values: Ref, first: jax.Array) -> None:
        """Zeroes the values of a block from position `first` on that no query sees.

        Their weights are zero, but they may be NaN: in the rest of a row's last page, in pages outside a window, and
        where no page was copied.
        """
        layout = plgpu.Layout.MMA_ACC(self.attention.dtype, m_warps=1)
        at = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
        kept = plgpu.load(values, layout=layout, optimized=False)
        is_seen = (at >= self._piece.seen) & (at < self._piece.kv_len)
        values[...] = jnp.where(is_seen, kept, jnp.zeros_like(kept))
