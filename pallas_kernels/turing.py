"""`mma` of NVIDIA's Turing GPUs (T4), for kernels of Mosaic GPU, which itself knows only that of later ones.

Turing multiplies float16 by eight inputs at a time and later GPUs by sixteen. The registers of sixteen are those of the
first eight and then those of the other eight, so one instruction of later GPUs is two of Turing's.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

INPUTS = 16  # of one instruction of later GPUs, whose layouts of registers these are
_INSTRUCTION = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"


def mma(acc: jax.Array, a: jax.Array, b: jax.Array, m_warps: int = 4) -> jax.Array:
    """Computes acc f32[M, N] + a f16[M, K] @ b f16[K, N] in the registers of a warpgroup, as `plgpu.mma` does.

    Their layouts are `MMA_ACC`, `MMA_LHS` and `MMA_RHS` of float16 with so many warps along M.
    """
    layouts = (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
    of_acc, of_a, of_b = (partial(layout, jnp.float16, m_warps=m_warps)() for layout in layouts)
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=of_acc)

    @plgpu.inline_mgpu(arg_types=(of_acc, of_a, of_b), return_type=result)
    def multiply(_: Any, acc: Any, a: Any, b: Any) -> Any:
        acc = acc.copy()
        rows, columns = acc.layout.base_tile_shape
        for first in range(0, a.shape[1], INPUTS):
            inputs = slice(first, first + INPUTS)
            for row in range(0, acc.shape[0], rows):
                for column in range(0, acc.shape[1], columns):
                    of_rows, of_columns = slice(row, row + rows), slice(column, column + columns)
                    part = acc[of_rows, of_columns]
                    acc[of_rows, of_columns] = _tile(part, a[of_rows, inputs], b[inputs, of_columns])
        return acc

    product: jax.Array = multiply(acc, a, b)
    return product


def _tile(acc: Any, a: Any, b: Any) -> Any:
    """Returns acc + a @ b for what one instruction of later GPUs multiplies."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pairs = list(acc.registers.flat)
    sums = [
        vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))
        for pair in pairs
        for place in range(2)
    ]
    of_a, of_b = ([mgpu.utils.bitcast(register, i32) for register in x.registers.flat] for x in (a, b))
    for half in range(2):
        operands = [*of_a[2 * half : 2 * half + 2], of_b[half], *sums]
        constraints = "=f,=f,=f,=f,r,r,r,f,f,f,f"
        four = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
        out = llvm.inline_asm(four, operands, _INSTRUCTION, constraints, has_side_effects=False)
        sums = [llvm.extractvalue(f32, out, [place]) for place in range(4)]
    held = np.empty(len(pairs), object)
    empty = llvm.mlir_undef(ir.VectorType.get((2,), f32))
    for index in range(len(pairs)):
        pair = llvm.insertelement(empty, sums[2 * index], position=mgpu.utils.c(0, i32))
        held[index] = llvm.insertelement(pair, sums[2 * index + 1], position=mgpu.utils.c(1, i32))
    registers = held.reshape(acc.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=acc.is_signed)
