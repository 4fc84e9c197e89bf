"""`ColumnBlock`: columns of a matrix of few bits in a TPU's VMEM, by which rows are multiplied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tpu import LANES
from pallas_kernels.quantized_matmul.tpu_words import BYTE_ROWS, WORD_ROWS, Decoding, bits_of, in_both_halves

INPUTS = 128  # of which a matrix has a multiple, and a group a divisor
# As many inputs as matrix units take are multiplied together, and so many products overlap. The last 128 may be alone.
CHUNK, UNROLLED = 256, 4
COLUMNS = 512  # that are computed together: so many sums of a few rows stay in registers
PIECE = 16  # the inputs of a register of bfloat16, of which a group has a multiple


def width_of(columns: int) -> int:
    """Returns the columns that are computed together, of so many."""
    return next(width for width in (COLUMNS, 384, 256, LANES) if columns % width == 0)


@dataclass(frozen=True)
class ColumnBlock:
    """Some columns of a matrix, in VMEM.

    codes  # i32[in / codes of a word, columns]
    scales  # i32[in / group, columns], bits of the factors of what codes are decoded into
    zeros  # as many, bits of what is subtracted from it, or None where that is `code.zero`

    dtype: of these factors, and of what numbers become before they are scaled. Both halves of a word have it, if it is
        bfloat16
    """

    decoding: Decoding
    codes: Any
    scales: Any
    zeros: Any | None
    dtype: Any
    group: int

    def begin(self, scales: Any, zeros: Any | None = None) -> None:
        """Makes factors of the scales and zeros of a checkpoint."""
        stored = scales[...]
        if stored.dtype == jnp.uint8:
            wide = pltpu.bitcast(stored.astype(jnp.int32) << 23, jnp.float32)
        else:
            wide = stored.astype(jnp.float32)
        self.scales[...] = self._bits(wide * self.decoding.factor)
        if zeros is not None:
            assert self.zeros is not None
            whole = zeros[...].astype(jnp.int32) - self.decoding.base
            self.zeros[...] = self._bits(whole.astype(jnp.float32) / self.decoding.factor)

    def _bits(self, values: jax.Array) -> jax.Array:
        return in_both_halves(values) if self.dtype == jnp.bfloat16 else pltpu.bitcast(values, jnp.int32)

    @property
    def _minus(self) -> float:
        """Returns what is subtracted from all numbers, if there are no zeros."""
        return (self.decoding.code.zero - self.decoding.base) / self.decoding.factor

    def sums_of_scaled(self, x: Any, columns: pl.Slice) -> jax.Array:
        """Returns the product of rows [T, in] with these columns: f32[T, columns]."""

        def add(number: jax.Array, size: int, sums: jax.Array) -> jax.Array:
            pieces, first = [], number * (CHUNK // self.group)
            for at, numbers in enumerate(self._numbers(number, size, columns)):
                wide = numbers.astype(self.dtype)
                for of_piece in range(0, BYTE_ROWS, PIECE):
                    group = first + (at * BYTE_ROWS + of_piece) // self.group
                    scaled = wide[of_piece : of_piece + PIECE]
                    if self.zeros is not None:
                        scaled = scaled - self._of_group(self.zeros, group, columns)
                    elif self._minus:
                        scaled = scaled - jnp.asarray(self._minus, self.dtype)
                    pieces.append(scaled * self._of_group(self.scales, group, columns))
            part = x[:, pl.ds(pl.multiple_of(number * CHUNK, INPUTS), size)]
            return sums + product(part, jnp.concatenate(pieces).astype(x.dtype))

        return self._over_chunks(add, x.shape[0], columns)

    def _of_group(self, ref: Any, group: jax.Array, columns: pl.Slice) -> jax.Array:
        """Returns the scales or zeros of a group, for 1 or 16 of its rows."""
        bits = ref[pl.ds(group, 1), columns]
        if self.dtype == jnp.bfloat16:
            bits = jnp.broadcast_to(bits, (PIECE // 2, bits.shape[1]))
        return pltpu.bitcast(bits, self.dtype)

    def scaled_sums(self, x: Any, num_rows: int, sums_of_groups: Sequence[Any], columns: pl.Slice) -> jax.Array:
        """Returns the product of the first `num_rows` of rows bf16[T, in] with these columns: f32[num_rows, columns].

        T is a multiple of 16. `sums_of_groups` has f32[T, in / group] of these rows, if zeros are subtracted.
        """

        def add(number: jax.Array, size: int, sums: jax.Array) -> jax.Array:
            operand = jnp.concatenate(list(self._numbers(number, size, columns)))
            if operand.dtype == jnp.int8:
                operand = operand.astype(self.dtype).astype(x.dtype)
            rows = self._by_group(x[:, pl.ds(pl.multiple_of(number * CHUNK, INPUTS), size)])
            part = product(jnp.concatenate(rows), operand)
            for i in range(len(rows)):
                own = part[i * x.shape[0] : i * x.shape[0] + num_rows]
                sums = sums + own * self._of_group(self.scales, number * (CHUNK // self.group) + i, columns)
            return sums

        sums = self._over_chunks(add, num_rows, columns)
        # Integers of four bits are at most 15 before a zero is subtracted, so that little cancels out.
        for of_groups in sums_of_groups:
            minus = self._minus if self.zeros is None else pltpu.bitcast(self.zeros[:, columns], jnp.float32)
            scaled = minus * pltpu.bitcast(self.scales[:, columns], jnp.float32)
            sums = sums - product(of_groups[:num_rows], scaled)
        return sums

    def _by_group(self, rows: jax.Array) -> list[jax.Array]:
        """Returns rows of a chunk for each of its groups, with zeros in the place of the inputs of others."""
        words = pltpu.bitcast(rows, jnp.int32)
        tiles = [words[:, at : at + INPUTS] for at in range(0, rows.shape[1], INPUTS)]
        number = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, tiles[0].shape, 1), self.group)
        nothing, found = jnp.zeros_like(tiles[0]), []
        for at in range(len(tiles)):
            for i in range(INPUTS // self.group):
                own = tiles[at] if self.group == INPUTS else jnp.where(number == i, tiles[at], nothing)
                of_chunk = [own if tile == at else nothing for tile in range(len(tiles))]
                found.append(pltpu.bitcast(jnp.concatenate(of_chunk, 1), rows.dtype))
        return found

    def _over_chunks(self, add: Any, num_rows: int, columns: pl.Slice) -> jax.Array:
        size = self.codes.shape[0] * 32 // bits_of(self.decoding.code)
        turns, rest = divmod(size, UNROLLED * CHUNK)

        def some(turn: jax.Array, sums: jax.Array, inputs: int = UNROLLED * CHUNK) -> jax.Array:
            for i in range(pl.cdiv(inputs, CHUNK)):
                sums = add(turn * UNROLLED + i, min(CHUNK, inputs - i * CHUNK), sums)
            return sums

        sums = jnp.zeros((num_rows, columns.size), jnp.float32)
        if turns:  # or a loop that never turns would be compiled
            sums = jax.lax.fori_loop(0, turns, some, sums)
        return some(jnp.int32(turns), sums, rest)

    def _numbers(self, number: jax.Array, size: int, columns: pl.Slice) -> Iterator[jax.Array]:
        """Yields the numbers of the first inputs of a chunk, so many, [32, columns] at a time."""
        of_chunk = CHUNK * bits_of(self.decoding.code) // 32
        for at in range(0, of_chunk * size // CHUNK, WORD_ROWS):
            words = self.codes[pl.ds(pl.multiple_of(number * of_chunk + at, WORD_ROWS), WORD_ROWS), columns]
            yield from self.decoding.numbers(words)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x w in float32, whose factors are not rounded."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
