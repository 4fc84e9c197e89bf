"""The computation for one tile of queries and one block of KV: sizes, logits, masks, and the online softmax.

A tile is the 64 rows of one matrix instruction of a warpgroup, or fewer where each of its warps has some of the
columns: query i of the tile and query head g of the KV head's group are row i * G + g.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import LANES, TILE, WARP_ROWS, MatrixUnit, Ref
from pallas_kernels.ragged_paged_attention.quantize import largest_code

ALIGNMENT = 1024  # bytes of shared memory at a multiple of which each array begins
LOG2E = math.log2(math.e)
# It is finite, because a row that sees nothing must yield finite values, which get no weight afterwards.
MASKED = -1e30

type Softmax = tuple[jax.Array, jax.Array, jax.Array]  # values f32[M, D], largest logit and denominator f32[M]


class Where(NamedTuple):
    """The layer and its window. They are two operands, because XLA writes them into one by a kernel of its own."""

    layer: jax.Array  # i32[1]
    window: jax.Array  # i32[1]

    @classmethod
    def of(cls, layer: jax.Array | int, window: jax.Array | int) -> Self:
        return cls(*(jnp.asarray(number, jnp.int32).reshape(1) for number in (layer, window)))


@dataclass(frozen=True)
class AttentionBuild:
    """The operation, with everything that is known when compiling. A block, B, is the KV of one step of the softmax.

    A tile has M rows.
    """

    scale: float
    soft_cap: float | None
    has_slopes: bool
    group: int  # query heads of a KV head
    head_size: int  # of queries and keys
    row_size: int  # the numbers that a page keeps of a token for one KV head
    value_size: int  # the columns of values that one warpgroup adds up
    page_size: int
    num_pages: int  # of one layer
    num_kv_heads: int
    dtype: jnp.dtype  # of queries, products and output
    kv_dtype: jnp.dtype
    num_scales: int  # of a token's own, for one KV head: of its key, and of its value if that is no part of the key
    matrix_unit: MatrixUnit
    rows: int  # of a tile, M
    block: int  # tokens
    stages: int  # blocks in shared memory that one warp fetches into
    warpgroups: int  # that compute
    interpret: bool

    @classmethod
    def of_heads(
        cls,
        q: jax.Array | jax.ShapeDtypeStruct,
        kv_pages: jax.Array | jax.ShapeDtypeStruct,
        *,
        by_token: bool,
        scale: float,
        soft_cap: float | None,
        has_slopes: bool,
        matrix_unit: MatrixUnit,
        warpgroups: int,
        interpret: bool,
    ) -> Self:
        """Returns the operation on q [T, H, D] and pages [L, P, K, S, 2 * D], from which kernels take their own sizes.

        by_token: whether each token has scales of its own
        """
        _, num_heads, head_size = q.shape
        _, num_pages, num_kv_heads, page_size, _ = kv_pages.shape
        return cls(
            scale=scale,
            soft_cap=soft_cap,
            has_slopes=has_slopes,
            group=num_heads // num_kv_heads,
            head_size=head_size,
            row_size=2 * head_size,
            value_size=head_size,
            page_size=page_size,
            num_pages=num_pages,
            num_kv_heads=num_kv_heads,
            dtype=q.dtype,
            kv_dtype=kv_pages.dtype,
            num_scales=2 if by_token else 0,
            matrix_unit=matrix_unit,
            rows=TILE,
            block=TILE,
            stages=2,
            warpgroups=warpgroups,
            interpret=interpret,
        )

    def __post_init__(self) -> None:
        assert self.block % self.copy_tokens == 0 and self.block % (8 * TILE // self.rows) == 0, self
        assert self.head_size % LANES == 0 and self.group <= self.rows, self

    @property
    def tile_queries(self) -> int:
        """The number of queries in a tile."""
        return self.rows // self.group

    @property
    def layout(self) -> Any:
        """The layout of a tile of products in the registers of a warpgroup, which has 16 rows in each of its warps.

        In a tile of 16 rows each warp has every fourth group of eight columns, and in one of 32 rows every second.
        """
        if self.rows == TILE:
            return plgpu.Layout.WGMMA
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=self.rows // WARP_ROWS)

    @property
    def columns(self) -> Any:
        """The layout of a number for each column of a tile of products."""
        return self.layout.reduce(0)

    @property
    def q_columns(self) -> int:
        """The columns of a tile's queries that are fetched at a time."""
        return self.head_size if self.matrix_unit == "wgmma" and self.head_size <= 2 * LANES else LANES

    @property
    def copy_tokens(self) -> int:
        """The tokens that one copy fetches: a page, or the part of it that fits a block."""
        return min(self.page_size, self.block)

    @property
    def stage_scales(self) -> int:
        """The rows of scales in all stages."""
        return self.stages * self.num_scales

    @property
    def converts(self) -> bool:
        """Whether the kernel must convert stored keys and values to the queries' dtype."""
        return self.kv_dtype != self.dtype

    def scale_columns(self, x: jax.Array, scales: Ref | None) -> jax.Array:
        """Multiplies the columns of x f[M, B], which are tokens, by their scales f32[B], if they have some."""
        return x if scales is None else self._times(x, plgpu.load(scales, layout=self.columns, optimized=False))

    def scale_seen(
        self, weights: jax.Array, scales: Ref | None, first: jax.Array, begin: jax.Array, end: jax.Array
    ) -> jax.Array:
        """Multiplies the weights f32[M, B] of the block from position `first` on by the largest numbers of its values,
        which are their scales times the largest code. `inverse` divides by that code.

        A scale is 127 times as small in int8, and float16 would have no product of it with a weight of 1e-5.
        Outside begin .. end - 1 the weights are zero, but scales may be NaN.
        """
        if scales is None:
            return weights
        at = first + plgpu.broadcasted_iota(jnp.int32, (self.block,), 0, layout=self.columns)
        loaded = plgpu.load(scales, layout=self.columns, optimized=False)
        largest = loaded * largest_code(self.kv_dtype)
        return self._times(weights, jnp.where((at >= begin) & (at < end), largest, jnp.zeros_like(largest)))

    def inverse(self, total: jax.Array) -> jax.Array:
        """Returns the factors f32[M] by which sums over values become averages, from the denominators f32[M]."""
        return (1.0 / largest_code(self.kv_dtype) if self.num_scales else 1.0) / total

    @staticmethod
    def _times(x: jax.Array, columns: jax.Array) -> jax.Array:
        return x * lax.broadcast_in_dim(columns, x.shape, [1])

    def start(self) -> Softmax:
        """Returns the online softmax before the first block."""
        of_rows = self.layout.reduce(1)
        return (
            plgpu.layout_cast(jnp.zeros((self.rows, self.value_size), jnp.float32), self.layout),
            plgpu.layout_cast(jnp.full((self.rows,), MASKED, jnp.float32), of_rows),
            plgpu.layout_cast(jnp.zeros((self.rows,), jnp.float32), of_rows),
        )

    def logits(self, products: jax.Array) -> jax.Array:
        """Returns logits f32[M, B] from q . k: scaled, bent by the soft cap, and in units of log 2."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + e^2x): the hardware's own tanh is off by 2^-11, at a cap of 50 one percent of a weight.
        bent = 1.0 - 2.0 / (1.0 + jnp.exp2(products * (2.0 * LOG2E * self.scale / self.soft_cap)))
        return bent * (self.soft_cap * LOG2E)

    def rows_of(self, of_heads: jax.Array) -> jax.Array:
        """Returns for each row of a tile, f32[K, M], log2(e) times the number of its head in `of_heads` f32[H]."""
        rows = jnp.tile(of_heads.reshape(self.num_kv_heads, self.group) * LOG2E, (1, self.tile_queries))
        return jnp.pad(rows, ((0, 0), (0, self.rows - self.tile_queries * self.group)))

    def slopes_of(self, slopes: jax.Array | None, where: Where) -> jax.Array:
        """Returns the slopes f32[K, M] of the rows of a tile, of those f32[H] of query heads.

        Without slopes no code reads them, and another operand stands in their place: zeros would be written in each
        layer, by a kernel of their own (0.8 us of an H100, where a layer that decodes had 23 kernels).
        """
        return where.layer if slopes is None else self.rows_of(slopes.astype(jnp.float32))

    def lean(
        self, logits: jax.Array, slope_rows: Ref, head: jax.Array, first: jax.Array, position: jax.Array
    ) -> jax.Array:
        """Subtracts from the logits of a block the distances of its tokens, times the slopes f32[K, M] of their rows.

        The block begins at position `first`, and the tile's first query is at `position`.
        """
        if not self.has_slopes:
            return logits
        slopes = plgpu.load(slope_rows.at[head], layout=self.layout.reduce(1), optimized=False)
        query = position + lax.div(self.iota(logits.shape, 0), jnp.int32(self.group))
        ahead = (first + self.iota(logits.shape, 1) - query).astype(jnp.float32)
        return logits + lax.broadcast_in_dim(slopes, logits.shape, [0]) * ahead

    def mask(self, logits: jax.Array, first: jax.Array, position: jax.Array, window: jax.Array) -> jax.Array:
        """Masks the logits of a block from position `first` on, for the tile whose first query is at `position`."""

        def apply(x: jax.Array) -> jax.Array:
            at = first + self.iota(x.shape, 1)
            query = position + lax.div(self.iota(x.shape, 0), jnp.int32(self.group))
            return jnp.where((at <= query) & (at > query - window), x, MASKED)

        last = position + self.tile_queries - 1
        unseen = (first + self.block - 1 > position) | (first <= last - window)
        return lax.cond(unseen, apply, lambda x: x, logits)

    def iota(self, shape: tuple[int, ...], dimension: int) -> jax.Array:
        """Returns numbers along `dimension`, laid out in registers like a tile of products."""
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=self.layout)

    def fold(self, logits: jax.Array, softmax: Softmax) -> tuple[jax.Array, Softmax]:
        """Returns the block's weights f32[M, B], and the online softmax to which its weighted values are added."""
        values, peak, total = softmax
        weights, decay, peak, total = self.weigh(logits, peak, total)
        return weights, (scaled_rows(values, decay), peak, total)

    def weigh(
        self, logits: jax.Array, peak: jax.Array, total: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns the block's weights f32[M, B], the factor f32[M] of what was summed before, and the largest logits
        and denominators with the block in them."""
        highest = jnp.maximum(peak, logits.max(axis=1))
        decay = jnp.exp2(peak - highest)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(highest, logits.shape, [0]))
        return weights, decay, highest, total * decay + weights.sum(axis=1)


def first_to_fit(
    candidates: Iterable[AttentionBuild], memory: Callable[[AttentionBuild], dict[str, Any]], room: int
) -> AttentionBuild | None:
    """Returns the first candidate whose arrays in shared memory, barriers aside, take `room` bytes at most."""
    for attention in candidates:
        references = [spec for spec in memory(attention).values() if not isinstance(spec, plgpu.Barrier)]
        sizes = (math.prod(spec.shape) * spec.dtype.itemsize for spec in references)
        if sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) <= room:
            return attention
    return None


def refuse(problem: str | None) -> None:
    """Raises NotImplementedError if there is a problem."""
    if problem is not None:
        raise NotImplementedError(f"the GPU kernel cannot: {problem}. Use the backend reference")


def problem_of_queries(q: jax.Array | jax.ShapeDtypeStruct, largest: int) -> str | None:
    """Returns why no kernel takes these queries, whose heads may have sizes up to `largest`."""
    head_size = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {q.dtype}, neither bfloat16 nor float16 (the option dtype)"
    if head_size % LANES or head_size > largest:
        return f"heads have size {head_size}, not a multiple of {LANES} up to {largest}"
    return None


def scaled_rows(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies each row of x f[M, columns] by its factor f[M]."""
    return x * lax.broadcast_in_dim(factors, x.shape, [0])
