"""Functions of vectors of bytes, four in each lane of 32 bits: dot products, and tables of 16 and of 128 bytes."""

from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.dots import byte_products, dot_for
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import I8, I16, Value

_BITS = 8
_VBMI = "avx512vbmi"


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


def has_table_of_128(chip: CpuChip) -> bool:
    """Tells whether the chip has an instruction for `looked_up_of_128`."""
    return chip.lanes == 16 and chip.has(_VBMI)


def looked_up_of_128(table: Sequence[int], places: Value) -> Value:
    """Returns for each byte of `places` the byte of a table at this place, of which the highest bit counts for nothing.

    VPERMI2B does so with two registers that hold the table.
    """
    e = places.emitter
    if _VBMI in e.chip.emulated:
        return _found_in_parts(table, places)
    indices = _as(places, I8)
    low, high = (Value(e, ir.Constant(indices.ir.type, signed_bytes(table[i : i + 64]))) for i in (0, 64))
    found = e.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", indices.ir.type, low, indices, high)
    return Value(e, e.builder.bitcast(found.ir, places.ir.type))


def _found_in_parts(table: Sequence[int], places: Value) -> Value:
    """Looks all places up in each sixteenth of a table, and takes what each place's own part has."""
    e = places.emitter
    found = places
    for first in range(0, 128, 16):
        here = _as(looked_up(signed_bytes(table[first : first + 16]), places & 0x0F0F0F0F), I8)
        is_here = (_as(places, I8) & 0x70).equals(first)
        found = Value(e, e.builder.bitcast(e.select(is_here, here, _as(found, I8)).ir, places.ir.type))
    return found


def signed_bytes(table: Sequence[int]) -> list[int]:
    """Returns bytes as the integers of eight bits with a sign that LLVM writes them as."""
    return [(byte ^ 0x80) - 0x80 for byte in table]


def _as(words: Value, element: ir.IntType) -> Value:
    """Returns the same bits as a vector of narrower integers."""
    e: Emitter = words.emitter
    return Value(e, e.builder.bitcast(words.ir, ir.VectorType(element, 32 * e.lanes // element.width)))


def _arithmetic_shift(words: Value, bits: int) -> Value:
    """Moves bits to the right and fills up with the sign."""
    e = words.emitter
    return Value(e, e.builder.ashr(words.ir, ir.Constant(words.ir.type, [bits] * words.ir.type.count)))
