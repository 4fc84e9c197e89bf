"""Functions of vectors of bytes, four in each lane of 32 bits: dot products, and tables of 16 bytes."""

from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.cpu.dots import byte_products, dot_for
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import I8, I16, Value

_BITS = 8


def dot_bytes(total: Value, codes: Value, numbers: Value, most: int) -> Value:
    """Adds to each lane of `total` the products of its four bytes of `codes` and `numbers`, all in integers.

    Codes are unsigned, at most `most`, and numbers are signed, at least -127. The result is exact modulo 2**32.
    """
    e = total.emitter
    dot = dot_for(e.chip, "uint8", "int8", most)
    if dot is None and most < 128:
        dot = dot_for(e.chip, "int8", "int8")
    if dot is not None:
        return dot(codes, numbers, total)
    if e.chip.triple.startswith("x86"):
        return total + _wide_pairs(codes, numbers)
    return byte_products(codes, numbers, total, False, True)


def _wide_pairs(codes: Value, numbers: Value) -> Value:
    """Multiplies any bytes, of which it makes words of 16 bits: the bytes at even places, and those at odd places."""
    codes, numbers = _as(codes, I16), _as(numbers, I16)
    even = _pairs(codes & 0xFF, _arithmetic_shift(numbers << _BITS, _BITS))
    return even + _pairs(codes >> _BITS, _arithmetic_shift(numbers, _BITS))


def _pairs(a: Value, b: Value) -> Value:
    e = a.emitter
    name = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}[e.lanes]
    return e.intrinsic(name, ir.VectorType(ir.IntType(32), e.lanes), a, b)


def looked_up(table: Sequence[int], places: Value) -> Value:
    """Returns for each byte of `places`, 0 to 15, the byte at this place of a table."""
    e = places.emitter
    constant = Value(e, ir.Constant(ir.VectorType(I8, 4 * e.lanes), list(table) * (e.lanes // 4)))
    if e.chip.triple.startswith("x86"):
        name = {
            16: "llvm.x86.avx512.pshuf.b.512",
            8: "llvm.x86.avx2.pshuf.b",
            4: "llvm.x86.ssse3.pshuf.b.128",
        }[e.lanes]
    else:
        name = "llvm.aarch64.neon.tbl1.v16i8"
    found = e.intrinsic(name, constant.ir.type, constant, _as(places, I8))
    return Value(e, e.builder.bitcast(found.ir, places.ir.type))


def _as(words: Value, element: ir.IntType) -> Value:
    """Returns the same bits as a vector of narrower integers."""
    e: Emitter = words.emitter
    return Value(e, e.builder.bitcast(words.ir, ir.VectorType(element, 32 * e.lanes // element.width)))


def _arithmetic_shift(words: Value, bits: int) -> Value:
    """Moves bits to the right and fills up with the sign."""
    e = words.emitter
    return Value(e, e.builder.ashr(words.ir, ir.Constant(words.ir.type, [bits] * words.ir.type.count)))
