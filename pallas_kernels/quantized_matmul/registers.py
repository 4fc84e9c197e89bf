"""`Registers`: makes operands of a matrix unit from codes that a warpgroup of an NVIDIA GPU holds in its registers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import batched
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic_gpu import TILE, MatrixUnit, Ref
from pallas_kernels.quantized_matmul.code import INT8, Code

WORD_BYTES = 4
_WARPGROUP_THREADS = 128
# Rows of 64, four threads each: a warp has 16 rows, and a thread two of them, eight rows apart.
_BYTES = plgpu.Layout.WGMMA_8BIT
WORDS = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
_Held = plgpu.ShapeDtypeStruct
ROWS = plgpu.Layout.WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
# The mantissa bits of the dtypes of activations, and what is added to their exponents.
_MANTISSA, _BIAS = {"bfloat16": 7, "float16": 10}, {"bfloat16": 127, "float16": 15}
# The mantissa bits of the codes that are floats, and what is added to their exponents.
_FLOATS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "float4_e2m1fn": (1, 1)}
# The inputs of a group whose scale multiplies its numbers: of the words of a row's four threads, two have one group.
FOLDED_GROUP = 16
# Numbers are so many powers of two smaller than scales make them: those that a scale of 448 made of E2M1's zeros in the
# exponent would be beyond the largest float.
FOLDED_EXPONENT = -8


@dataclass(frozen=True)
class RowPanels:
    """The rows of each part of a matrix: codes have so many, of which the last ones may belong to no row."""

    of_codes: int = 1
    of_values: int = 1


@dataclass(frozen=True)
class Registers:
    """Numbers of `code` and of `dtype`, f[64, K], as operands of a matrix unit."""

    code: Code
    dtype: jnp.dtype
    matrix_unit: MatrixUnit
    interpret: bool
    panels: RowPanels = RowPanels()

    @property
    def pairs(self) -> int:
        """The pairs of numbers that a word has."""
        return WORD_BYTES * self.code.per_byte // 2

    @property
    def operand(self) -> Any:
        """The layout of the first operand of the matrix unit. Both units want the same registers."""
        return plgpu.Layout.WGMMA if self.matrix_unit == "wgmma" else plgpu.Layout.MMA_LHS(self.dtype)

    def words(self, codes: Ref) -> jax.Array:
        """Loads codes u8[64, B] from shared memory as words u32[64, B / 4], whose first byte is the lowest."""
        rows, num_bytes = codes.shape
        shape = rows, num_bytes // WORD_BYTES
        if self.interpret:
            of_words = codes[...].reshape(*shape, WORD_BYTES).astype(jnp.uint32)
            return sum((of_words[..., i] << np.uint32(8 * i) for i in range(1, WORD_BYTES)), of_words[..., 0])

        def renamed(_: Any, array: Any) -> Any:
            word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
            layout = WORDS.to_mgpu()
            registers = [mgpu.utils.bitcast(register, word) for register in array.registers.flat]
            return _array(registers, layout, shape, is_signed=False)

        return _inlined(renamed, (_BYTES,), _Held(shape, jnp.uint32, layout=WORDS))(plgpu.load(codes, layout=_BYTES))

    @property
    def masks(self) -> tuple[int, ...]:
        """The half words that choose bits of a code, for `decoded`. A kernel takes their words from memory.

        ptxas makes a constant anew for each instruction that has two of them, which would be 64 of 341 instructions
        of a stage of int4.
        """
        if self.code.name == self.dtype.name:
            return (0,)  # no code is decoded
        if self.code.name in _FLOATS:
            return 1 << 15, (1 << self._size) - 1 << self._at
        return (15,) if self.code.name == "uint4" else (255,) if _MANTISSA[self.dtype.name] >= 8 else (127, 128)

    def decoded(
        self,
        words: jax.Array,
        zeros: jax.Array | None,
        masks: Sequence[jax.Array],
        scales: Sequence[jax.Array] = (),
    ) -> jax.Array:
        """Returns the numbers of words u32[64, W] minus zeros [64], or minus the code's own zero: f[64, W numbers].

        Nothing is rounded. The columns are those of `QuantizedProduct.reordered`. `masks` are words u32[] of the half
        words that the property says. `scales` are words u32[64] of scales in E4M3, each of 16 inputs of E2M1, by which
        numbers are multiplied, and by 2**-8. This is exact, too: products have six bits.
        """
        if self.code.name in _FLOATS:
            numbers = self._moved(words, *masks)
            if scales:
                return self._times(numbers, scales)
            return self._raised(numbers, _BIAS[self.dtype.name] - _FLOATS[self.code.name][1])
        mantissa, bias = _MANTISSA[self.dtype.name], _BIAS[self.dtype.name]
        # The bits of a small integer are the last ones of the mantissa of this float plus the integer.
        base = 2**mantissa
        magic = twice(mantissa + bias << mantissa)
        width = 8 // self.code.per_byte
        if self.code == INT8 and mantissa >= 8:  # the sign's bit counts as 128 when it is flipped
            words, base = words ^ twice(128 << 8 | 128), base + 128
        shifted = [words >> np.uint32(width * pair) for pair in range(self.pairs)]
        values = self._paired([word & masks[0] | magic for word in shifted])
        if len(masks) > 1:
            # The seven bits beside the sign, minus what the sign's bit stands for: as the last bit of the exponent, it
            # makes 256 of 128.
            values, base = values - self._paired([word & masks[1] | magic for word in shifted]), 0
        if zeros is not None:
            minus = (zeros.astype(jnp.float32) + base).astype(self.dtype)
            return values - self._spread(minus, values.shape)
        minus = base + self.code.zero
        return values - jnp.asarray(minus, self.dtype) if minus else values

    @property
    def _size(self) -> int:
        """The bits of the exponent and the mantissa of a code that is a float, which lie below the sign."""
        return 8 // self.code.per_byte - 1

    @property
    def _at(self) -> int:
        """The place in a half word of the last bit of the mantissa of a code that is a float."""
        return _MANTISSA[self.dtype.name] - _FLOATS[self.code.name][0]

    def _moved(self, words: jax.Array, sign: jax.Array, rest: jax.Array) -> jax.Array:
        """Moves the bits of floats to where those of a wider float are, whose exponent means another power of two."""
        pairs = []
        for pair in range(self.pairs):
            # Signs are the first bits of half words.
            aligned = words << np.uint32(16 - (self._size + 1) * (pair + 1))
            pairs.append(aligned & sign | aligned >> np.uint32(15 - self._size - self._at) & rest)
        return self._paired(pairs)

    def _times(self, numbers: jax.Array, scales: Sequence[jax.Array]) -> jax.Array:
        """Multiplies moved numbers f[64, K] by the scales of their groups, which words u32[64] have, and by 2**-8."""
        bits, bias = _FLOATS["float8_e4m3fn"]
        exponent = _BIAS[self.dtype.name] - bias
        raised = _BIAS[self.dtype.name] - _FLOATS[self.code.name][1]
        to_scale = _MANTISSA[self.dtype.name] - bits
        if self.interpret:  # XLA:CPU would take the numbers below the normal ones for zero, so these are raised first
            each = jnp.stack([word >> np.uint32(8 * i) & 127 for word in scales for i in range(WORD_BYTES)], 1)
            halves = lax.bitcast_convert_type((each << np.uint32(to_scale)).astype(jnp.uint16), self.dtype)
            factors = self._raised(self._raised(halves, exponent), FOLDED_EXPONENT)
            # Two threads have a group, which is a half of the columns of each pair.
            by_block = factors.reshape(TILE, -1, 1, 2, 1)
            blocks = self._raised(numbers, raised).reshape(TILE, by_block.shape[1], self.pairs, 2, 4)
            return (blocks * by_block).reshape(numbers.shape)
        # One power of two would be beyond the largest bfloat16.
        whole = exponent + raised + FOLDED_EXPONENT
        powers = [2.0**part for part in (whole // 2, whole - whole // 2)] if whole > 126 else [2.0**whole]

        def spread(_: Any, *arrays: Any) -> Any:
            c, i32 = mgpu.utils.c, ir.IntegerType.get_signless(32)
            pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(self.dtype))
            lane = arith.remui(mgpu.utils.thread_idx(), c(4, i32))
            shift = arith.muli(arith.divui(lane, c(2, i32)), c(8, i32))
            held = []
            for array in arrays:  # a word has the scales of two blocks of words of codes, for both halves of rows
                found = []
                for word in array.registers.flat:
                    own = arith.shrui(mgpu.utils.bitcast(word, i32), shift)
                    own = arith.shli(arith.andi(own, c(127 << 16 | 127, i32)), c(to_scale, i32))
                    both = mgpu.utils.bitcast(own, pair)
                    for power in powers:
                        both = arith.mulf(both, c(power, pair))
                    found.append(both)
                for block in range(2):
                    one = [mgpu.utils.vector_slice(both, slice(block, block + 1)) for both in found]
                    held += [mgpu.utils.vector_concat([value, value]) for value in one] * self.pairs
            return _array(held, self.operand.to_mgpu(), numbers.shape)

        result = _Held(numbers.shape, self.dtype, layout=self.operand)
        return numbers * _inlined(spread, (ROWS,) * len(scales), result)(*scales)

    def _raised(self, values: jax.Array, exponent: int) -> jax.Array:
        """Multiplies by 2**exponent. XLA:CPU would take the numbers below the normal ones for zero."""
        if exponent == 0:
            return values
        if not self.interpret:
            return values * jnp.asarray(2.0**exponent, self.dtype)
        mantissa, bias = _MANTISSA[self.dtype.name], _BIAS[self.dtype.name]
        bits = lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32)
        power, fraction = (bits & 32767) >> mantissa, bits & (1 << mantissa) - 1
        size = jnp.where(power > 0, fraction + (1 << mantissa), fraction).astype(jnp.float32)
        raised = jnp.ldexp(size, jnp.maximum(power, 1) - bias - mantissa + exponent)
        return jnp.where(bits > 32767, -raised, raised).astype(self.dtype)

    def _paired(self, pairs: Sequence[jax.Array]) -> jax.Array:
        """Returns f[64, W numbers] of words u32[64, W], one for each pair of half words: four threads have a row.

        Each thread has a pair of eight columns that follow each other.
        """
        rows, num_words = pairs[0].shape
        shape = rows, num_words * 2 * len(pairs)
        if self.interpret:
            halves = jnp.stack([jnp.stack([pair & 65535, pair >> 16], -1) for pair in pairs], 1)  # [64, pairs, W, 2]
            by_threads = halves.astype(jnp.uint16).reshape(rows, len(pairs), -1, 4, 2).transpose(0, 2, 1, 3, 4)
            return lax.bitcast_convert_type(by_threads.reshape(shape), self.dtype)

        def renamed(_: Any, *arrays: Any) -> Any:
            pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(self.dtype))
            # A word for each four columns and each half of the rows; the halves come after the pairs.
            words = np.stack([array.registers.reshape(-1, 2) for array in arrays], 1)
            held = [mgpu.utils.bitcast(word, pair) for word in words.flat]
            return _array(held, self.operand.to_mgpu(), shape)

        arguments, result = (WORDS,) * len(pairs), _Held(shape, self.dtype, layout=self.operand)
        return _inlined(renamed, arguments, result)(*pairs)

    def _spread(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns f[64, K] of values f[64], one for each row, in the registers of an operand."""
        if self.interpret:
            return lax.broadcast_in_dim(values, shape, (0,))

        def spread(_: Any, array: Any) -> Any:
            halves = [mgpu.utils.vector_concat([value, value]) for value in array.registers.flat]
            return _array(halves * (shape[1] // 8), self.operand.to_mgpu(), shape)

        return _inlined(spread, (ROWS,), _Held(shape, self.dtype, layout=self.operand))(values)

    def row_words(
        self, ref: Ref, matrix: jax.Array, row: jax.Array, column: jax.Array, count: int
    ) -> tuple[jax.Array, ...]:
        """Loads the bytes of `row_values` as words u32[64], the first byte of each is the lowest."""
        if self.interpret:
            values = [value.astype(jnp.uint32) for value in self.row_values(ref, matrix, row, column, count)]
            words = batched(values, WORD_BYTES)
            return tuple(sum((word[i] << np.uint32(8 * i) for i in range(1, WORD_BYTES)), word[0]) for word in words)
        column, count = lax.div(column, jnp.int32(WORD_BYTES)), count // WORD_BYTES
        return self.row_values(ref, matrix, row, column, count, jnp.dtype(jnp.uint32))

    def row_values(
        self,
        ref: Ref,
        matrix: jax.Array,
        row: jax.Array,
        column: jax.Array,
        count: int,
        dtype: jnp.dtype | None = None,
    ) -> tuple[jax.Array, ...]:
        """Loads ref[matrix, row : row + 64, i] from global memory, [64] each, for `count` columns from `column` on.

        Rows are counted as codes have them. Rows and columns that are not there are those before them. With a `dtype`,
        columns are numbers of it.
        """
        dtype = jnp.dtype(ref.dtype) if dtype is None else dtype
        _, num_rows, num_columns = ref.shape
        num_columns = num_columns * jnp.dtype(ref.dtype).itemsize // dtype.itemsize
        together = gcd(count, num_columns, 16 // dtype.itemsize)
        starts = [jnp.minimum(column + i, num_columns - together) for i in range(0, count, together)]
        wide, narrow = self.panels.of_codes, self.panels.of_values
        if self.interpret:
            at = row + jnp.arange(TILE)
            at = at // wide * narrow + jnp.minimum(at % wide, narrow - 1) if wide > narrow else at
            at = jnp.minimum(at, num_rows - 1)
            parts = [ref[matrix, :, pl.ds(start, together)][at] for start in starts]
            return tuple(part[:, i] for part in parts for i in range(together))
        loaded = _Held((TILE,), dtype, layout=ROWS)

        def load(_: Any, ref: Any, scalars: tuple[Any, ...]) -> Any:
            i64 = ir.IntegerType.get_signless(64)
            c = mgpu.utils.c
            matrix, row, *starts = (arith.extsi(i64, scalar.registers.item()) for scalar in scalars)
            thread = arith.extui(i64, mgpu.utils.thread_idx())
            thread = arith.remui(thread, c(_WARPGROUP_THREADS, i64))
            of_warp = arith.muli(arith.divui(thread, c(32, i64)), c(16, i64))
            own = arith.addi(arith.addi(row, of_warp), arith.divui(arith.remui(thread, c(32, i64)), c(4, i64)))
            element = mgpu.utils.dtype_to_ir_type(loaded.dtype)
            vector, base = ir.VectorType.get((together,), element), mgpu.utils.memref_ptr(ref)
            found = []
            for half in range(2):
                at = arith.addi(own, c(8 * half, i64))
                if wide > narrow:
                    within = arith.minsi(arith.remui(at, c(wide, i64)), c(narrow - 1, i64))
                    at = arith.addi(arith.muli(arith.divui(at, c(wide, i64)), c(narrow, i64)), within)
                at = arith.minsi(at, c(num_rows - 1, i64))
                at = arith.muli(arith.addi(arith.muli(matrix, c(num_rows, i64)), at), c(num_columns, i64))
                for start in starts:
                    pointer = mgpu.utils.getelementptr(base, [arith.addi(at, start)], element)
                    found.append(llvm.load(vector, pointer, invariant=True))
            halves, signed = np.array(found, object).reshape(2, -1), mgpu.utils.is_signed(loaded.dtype)

            def value(column: int) -> Any:
                part, at = divmod(column, together)
                held = [mgpu.utils.vector_slice(half[part], slice(at, at + 1)) for half in halves]
                return _array(held, ROWS.to_mgpu(), (TILE,), is_signed=signed)

            return tuple(map(value, range(count)))

        arguments = plgpu.RefType(), (_SCALAR,) * (2 + len(starts))
        values: tuple[jax.Array, ...] = _inlined(load, arguments, (loaded,) * count)(ref, (matrix, row, *starts))
        return values


def _inlined(code: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> Callable[..., Any]:
    """Returns a function of arrays that writes instructions: `code` of what their threads hold."""
    inlined: Callable[..., Any] = plgpu.inline_mgpu(arg_types=arguments, return_type=result)(code)
    return inlined


def _array(registers: Iterable[Any], layout: Any, shape: tuple[int, ...], is_signed: bool | None = None) -> Any:
    """Returns an array of Mosaic GPU whose threads hold these registers."""
    held = np.empty(layout.registers_shape(shape), object)
    held.flat = list(registers)
    return mgpu.FragmentedArray(_registers=held, _layout=layout, _is_signed=is_signed)


def twice(half: int) -> np.uint32:
    """Returns a word of two equal halves."""
    return np.uint32(half << 16 | half)
