"""The work of a computing warpgroup: products of queries with keys and of weights with values, on either matrix unit.

wgmma  (Hopper)               queries and KV from shared memory, weights from registers
mma    (Blackwell and later)  all from registers, weights by way of shared memory; a fraction of the speed of
                              Blackwell's own tcgen05, which works from tensor memory
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import (
    LANES,
    TILE,
    Ref,
    swizzled,
)
from pallas_kernels.ragged_paged_attention.gpu.fetch import query_columns
from pallas_kernels.ragged_paged_attention.gpu.tile import (
    AttentionBuild,
    scaled_rows,
)

# The layout of codes: a matrix instruction loads them, and numbers are stored four at a time.
WORDS = plgpu.Layout.WGMMA_8BIT

type Queries = (
    Ref | tuple[jax.Array, ...]
)  # a tile's, for `MatrixProducts.multiply_keys`: shared memory, or 64 columns each


def _nothing() -> None:
    pass


def matrix_memory(attention: AttentionBuild) -> dict[str, Any]:
    """Returns the shared memory of `MatrixProducts`, whose first index is the warpgroup."""
    warpgroups, dtype = attention.warpgroups, attention.dtype
    memory = {"q_columns": plgpu.SMEM((warpgroups, 1, TILE, attention.q_columns), dtype)}
    if attention.matrix_unit == "wgmma":
        memory["q_tile"] = swizzled((warpgroups, TILE, attention.head_size), dtype)
    else:
        memory["weights"] = swizzled((warpgroups, TILE, attention.block), dtype)
    if attention.converts:
        memory["converted"] = swizzled((warpgroups, 1, attention.block, attention.head_size), dtype)
    return memory


@dataclass(frozen=True)
class MatrixProducts:
    """The matrix products of one warpgroup, in its own part of `matrix_memory`."""

    attention: AttentionBuild
    memory: dict[str, Ref]

    def take_queries(self, here: Ref, free: Ref, zero: jax.Array) -> Queries:
        """Moves the tile's queries, part by part, from where they are fetched to where they are multiplied.

        `zero` is that of `unknown_zero`.
        """
        parts, fetched = [], self.memory["q_columns"].at[zero]
        for columns in query_columns(self.attention):
            plgpu.barrier_wait(here)
            if self.attention.matrix_unit == "wgmma":
                part = plgpu.load(fetched, layout=plgpu.Layout.WGMMA)
                self.memory["q_tile"][:, columns] = part
            else:
                parts.append(plgpu.load(fetched, layout=plgpu.Layout.MMA_LHS(self.attention.dtype)))
            plgpu.commit_smem()
            plgpu.barrier_arrive(free)
        return tuple(parts) or self.memory["q_tile"]

    def multiply_keys(
        self, queries: Queries, block: Ref, zero: jax.Array, meanwhile: Callable[[], None] = _nothing
    ) -> jax.Array:
        """Multiplies queries by the keys of a block kv[B, 2 * D]: f32[64, B]. `meanwhile` overlaps where it can.

        `zero` is that of `unknown_zero`.
        """
        keys = self._half(block, 0, zero)
        if self.attention.matrix_unit == "wgmma":

            def multiply(acc: Ref) -> jax.Array:
                plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
                meanwhile()
                return acc[...]

            return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, self.attention.block), jnp.float32))
        products = jnp.zeros((TILE, self.attention.block), jnp.float32)
        products = plgpu.layout_cast(products, plgpu.Layout.WGMMA)
        for part, start in zip(queries, range(0, self.attention.head_size, LANES), strict=True):
            b = keys.at[:, pl.ds(start, LANES)].transpose((1, 0))
            products = mma(self.attention, products, part, b)
        meanwhile()
        return products

    def values(self, block: Ref, zero: jax.Array) -> Ref:
        """Returns the values [B, D] of a block. Call it after `multiply_keys`, whose keys may lie in that memory."""
        return self._half(block, 1, zero)

    def multiply_values(
        self, summed: jax.Array, weights: jax.Array, values: Ref, meanwhile: Callable[[], None] = _nothing
    ) -> jax.Array:
        """Computes summed f32[64, D] + weights [64, B] @ values [B, D]. `meanwhile` overlaps where it can."""
        if self.attention.matrix_unit == "mma":
            self.memory["weights"][...] = weights
            for start in range(0, self.attention.block, LANES):
                part = self.memory["weights"].at[:, pl.ds(start, LANES)]
                part = plgpu.load(part, layout=plgpu.Layout.MMA_LHS(self.attention.dtype))
                for row in range(0, LANES, 16):
                    b = values.at[pl.ds(start + row, 16)]
                    summed = mma(self.attention, summed, part[:, row : row + 16], b)
        elif self.attention.interpret:
            # The interpreter of jax 0.11.2 multiplies from shared memory only.
            summed = summed + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        else:

            def multiply(acc: Ref) -> None:
                plgpu.wgmma(acc, weights, values)
                meanwhile()

            return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(summed))
        plgpu.commit_smem()  # ordinary reads must be over before the next copy writes
        meanwhile()
        return summed

    def _half(self, block: Ref, half: int, zero: jax.Array) -> Ref:
        """Returns the keys (half 0) or values of a block, in the queries' dtype."""
        attention = self.attention
        stored = block.at[:, pl.ds(half * attention.head_size, attention.head_size)]
        if not attention.converts:
            return stored
        converted = self.memory["converted"].at[zero]
        # All at once would take half as many registers as the sums (464 bytes of spills for heads of 128 on an H200).
        for row in range(0, attention.block, TILE):
            for column in range(0, attention.head_size, LANES):
                part = pl.ds(row, TILE), pl.ds(column, LANES)
                converted[part] = load_converted(attention, stored.at[part])
        plgpu.commit_smem()
        return converted


def unknown_zero(number: jax.Array) -> jax.Array:
    """Returns zero for the number of any block or row, which the compiler cannot know.

    Where memory is found by it, addresses are made anew for each block. The compiler keeps those that no block changes
    in registers, outside of the loop, and spilled for them: 204 bytes of latents, 328 of prompts' keys in int8.
    """
    return jnp.minimum(number, 0)


def load_converted(attention: AttentionBuild, stored: Ref, scales: Ref | None = None) -> jax.Array:
    """Loads keys and values of 8 bits as numbers of the queries' dtype, times the scales f32[B] of their tokens.

    A thread has four neighbours, a word of codes, where the layout of products would give it two.
    """
    numbers = plgpu.load(stored, layout=WORDS)
    if scales is not None:
        of_rows = plgpu.load(scales, layout=WORDS.reduce(1), optimized=False)
    if attention.dtype == jnp.bfloat16 and jnp.issubdtype(attention.kv_dtype, jnp.floating):
        numbers = numbers.astype(jnp.float32)  # the hardware cannot convert float8 to bfloat16
    numbers = numbers.astype(attention.dtype)
    # Codes are exact in 16 bits, and from there to 32 bits is a shift.
    return numbers if scales is None else scaled_rows(numbers.astype(jnp.float32), of_rows).astype(attention.dtype)


def mma(attention: AttentionBuild, acc: jax.Array, a: jax.Array, b: Ref) -> jax.Array:
    """Computes acc f32[64, N] + a [64, M] @ b [M, N] with the warp-level instruction."""
    if attention.interpret:
        return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, plgpu.load(b, layout=plgpu.Layout.MMA_RHS(attention.dtype)))


def zero_unseen(values: Ref, first: jax.Array, begin: jax.Array, end: jax.Array) -> None:
    """Zeroes the values of a block from position `first` on that lie outside begin .. end - 1.

    Their weights are zero, but they may be NaN: in the rest of a row's last page, and in pages outside a window.
    """
    at = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    kept = plgpu.load(values, layout=plgpu.Layout.WGMMA)
    values[...] = jnp.where((at >= begin) & (at < end), kept, jnp.zeros_like(kept))
    plgpu.commit_smem()
