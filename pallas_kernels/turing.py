"""Changes two functions of Mosaic GPU (jax 0.11.2), so that it compiles for Turing (compute capability 7.5).

Both go by the generation that is lowered for, so kernels for other GPUs are what they were. Each of them goes when
Mosaic GPU has the same: `_mma_single_tile` when it emits instructions of depth 8, and `_lift_fast_instr` when its
maximum has no `.NaN` below compute capability 8.0. `tests/pallas_kernels/test_deviceless.py` compiles for a T4, which
fails without them.
"""

import importlib
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

# The package has a function of the module's name.
_MMA = "jax.experimental.mosaic.gpu.mma"
_MULTIPLY = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"


def install() -> None:
    """Changes both functions, once."""
    mma: Any = importlib.import_module(_MMA)
    arrays: Any = fragmented_array.FragmentedArray
    if getattr(mma._mma_single_tile, "knows_turing", False):
        return
    deep, lift = mma._mma_single_tile, arrays._lift_fast_instr

    def multiply(acc: Any, a: Any, b: Any) -> Any:
        return _multiply_twice(acc, a, b) if _lowers_for_turing() else deep(acc, a, b)

    def lift_instruction(instruction: Any) -> Any:
        if isinstance(instruction, str) and _lowers_for_turing():
            instruction = instruction.replace(".NaN", "")
        return lift(instruction)

    multiply.knows_turing = True  # type: ignore[attr-defined]
    mma._mma_single_tile = multiply
    arrays._lift_fast_instr = staticmethod(lift_instruction)


def _lowers_for_turing() -> bool:
    return utils.get_arch().major < 8


def _multiply_twice(acc: Any, a: Any, b: Any) -> Any:
    """Computes acc + a @ b for one tile of float16: the operands of depth 8 are halves of the registers of depth 16."""
    assert isinstance(a.mlir_dtype, ir.F16Type), a.mlir_dtype
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

    def words(array: Any) -> list[Any]:
        return [utils.bitcast(register, i32) for register in array.registers.flatten()]

    def element(register: Any, index: int) -> Any:
        return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))

    sums = [element(register, index) for register in acc.registers.flatten() for index in range(2)]
    of_a, of_b = words(a), words(b)
    for half in range(2):
        operands = [*of_a[2 * half : 2 * half + 2], of_b[half], *sums]
        struct = llvm.StructType.get_literal([f32] * 4)
        product = llvm.inline_asm(struct, operands, _MULTIPLY, "=f,=f,=f,=f,r,r,r,f,f,f,f", has_side_effects=False)
        sums = [llvm.extractvalue(f32, product, [index]) for index in range(4)]
    pair, registers = ir.VectorType.get((2,), f32), []
    for low, high in zip(sums[::2], sums[1::2], strict=True):
        both = llvm.insertelement(llvm.mlir_undef(pair), low, position=utils.c(0, i32))
        registers.append(llvm.insertelement(both, high, position=utils.c(1, i32)))
    return fragmented_array.FragmentedArray(
        _registers=np.asarray(registers, dtype=object).reshape(acc.registers.shape),
        _layout=acc.layout,
        _is_signed=acc.is_signed,
    )
