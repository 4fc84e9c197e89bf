"""Functions of vectors of bytes, four in each lane of 32 bits: dot products, and tables of 16 bytes."""

from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import I8, I16, Value

_BITS = 8


def dot_bytes(total: Value, codes: Value, numbers: Value, most: int) -> Value:
    """Adds to each lane of `total` the products of its four bytes of `codes` and `numbers`, all in integers.

    Codes are unsigned, at most `most`, and numbers are signed, at least -127. The result is exact modulo 2**32.
    """
    e = total.emitter
    known, kind = e.chip.features.split(","), total.ir.type
    if e.chip.has_byte_dot:  # VPDPBUSD
        return e.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}", kind, total, codes, numbers)
    if e.chip.triple.startswith("x86"):
        return total + (_small_pairs(codes, numbers) if most * 127 * 2 < 2**15 else _wide_pairs(codes, numbers))
    if "+i8mm" in known or ("+dotprod" in known and most < 128):
        name = "usdot" if "+i8mm" in known else "sdot"
        operands = (_as(codes, I8), _as(numbers, I8))
        return e.intrinsic(f"llvm.aarch64.neon.{name}.v4i32.v16i8", kind, total, *operands)
    for place in range(0, 32, _BITS):
        number = _arithmetic_shift(numbers << (24 - place), 24)
        total = total + ((codes >> place) & 0xFF) * number
    return total


def _small_pairs(codes: Value, numbers: Value) -> Value:
    """Multiplies bytes whose sums of two products fit 16 bits: VPMADDUBSW, which would cut off larger ones."""
    e = codes.emitter
    name = {8: "llvm.x86.avx2.pmadd.ub.sw", 4: "llvm.x86.ssse3.pmadd.ub.sw.128"}[e.lanes]
    pairs = e.intrinsic(name, ir.VectorType(I16, 2 * e.lanes), _as(codes, I8), _as(numbers, I8))
    return _pairs(pairs, Value(e, ir.Constant(pairs.ir.type, [1] * 2 * e.lanes)))


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
