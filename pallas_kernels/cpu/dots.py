"""The instructions that add up products of neighbours, one description each, for whichever CPU has them.

Each has its meaning beside it, as other instructions. A kernel for a CPU that is not here runs with these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.values import F32, I8, I16, I32, Value, elements

# Emits c + (products of a and b), of three vectors of as many lanes of 32 bits.
type EmitDot = Callable[[Value, Value, Value], Value]


@dataclass(frozen=True)
class Dot:
    """An instruction that adds to each lane of c the products of the two or four neighbours there in a and in b.

    name: as manuals of the CPU call it
    feature: LLVM's name of what a CPU must have
    lanes: those of the vectors that it takes
    a, b: the dtypes of the factors
    emit: emits the instruction
    meaning: emits instructions that every CPU has, with the same result
    most: the largest factor in a with which no sum is cut off
    """

    name: str
    feature: str
    lanes: tuple[int, ...]
    a: str
    b: str
    emit: EmitDot
    meaning: EmitDot
    most: int = 255

    def __call__(self, a: Value, b: Value, c: Value) -> Value:
        """Emits c + a . b, where a and b are vectors of any type."""
        is_emulated = self.feature in c.emitter.chip.emulated
        return (self.meaning if is_emulated else self.emit)(a, b, c)


def dot_for(chip: CpuChip, a: str, b: str, most: int = 0) -> Dot | None:
    """Returns the chip's instruction for factors of the dtypes `a`, up to `most`, and `b` in whole vectors, or None."""
    for dot in DOTS:
        if (dot.a, dot.b) == (a, b) and most <= dot.most and chip.lanes in dot.lanes and chip.has(dot.feature):
            return dot
    return None


def cast(vector: Value, element: Any, per_lane: int) -> Value:
    """Returns the bits of a vector as `per_lane` elements for each of its lanes of 32 bits."""
    e = vector.emitter
    return Value(e, e.builder.bitcast(vector.ir, ir.VectorType(element, per_lane * e.lanes)))


def _instruction(name: str, element: Any, per_lane: int) -> EmitDot:
    """Returns what calls LLVM's intrinsic of that name, whose factors are such elements."""

    def emit(a: Value, b: Value, c: Value) -> Value:
        e = c.emitter
        factors = (cast(x, element, per_lane) for x in (a, b))
        return e.intrinsic(name.format(bits=32 * e.lanes), c.ir.type, c, *factors)

    return emit


class Bfloat(ir.Type):  # type: ignore[misc]  # llvmlite has no annotations
    """LLVM's bfloat, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


# Bytes


def byte(words: Value, number: int, is_signed: bool) -> Value:
    """Returns byte `number` of each word of 32 bits, as such a word."""
    e = words.emitter
    high = words << (24 - 8 * number)
    if not is_signed:
        return high >> 24
    return Value(e, e.builder.ashr(high.ir, ir.Constant(high.ir.type, elements(24, high.ir.type))))


def byte_products(a: Value, b: Value, c: Value, a_is_signed: bool, b_is_signed: bool) -> Value:
    """Emits c plus the products of the four bytes in each word of a and b. Sums wrap around."""
    a, b = cast(a, I32, 1), cast(b, I32, 1)
    for number in range(4):
        c = c + byte(a, number, a_is_signed) * byte(b, number, b_is_signed)
    return c


def _bytes(a_is_signed: bool, b_is_signed: bool) -> EmitDot:
    return lambda a, b, c: byte_products(a, b, c, a_is_signed, b_is_signed)


def _multiply_and_add_halves(a: Value, b: Value, c: Value) -> Value:
    """Adds the products of two bytes in 16 bits, which saturate, and then two of these in 32."""
    e = c.emitter
    first, second = {
        4: ("ssse3.pmadd.ub.sw.128", "sse2.pmadd.wd"),
        8: ("avx2.pmadd.ub.sw", "avx2.pmadd.wd"),
        16: ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512"),
    }[e.lanes]
    halves = ir.VectorType(I16, 2 * e.lanes)
    sums = e.intrinsic(f"llvm.x86.{first}", halves, cast(a, I8, 4), cast(b, I8, 4))
    ones = Value(e, ir.Constant(halves, elements(1, halves)))
    return c + e.intrinsic(f"llvm.x86.{second}", c.ir.type, sums, ones)


def _meaning_of_halves(a: Value, b: Value, c: Value) -> Value:
    a, b, e = cast(a, I32, 1), cast(b, I32, 1), c.emitter
    products = [byte(a, number, False) * byte(b, number, True) for number in range(4)]
    for pair in (products[0] + products[1], products[2] + products[3]):
        low, high = (Value(e, ir.Constant(pair.ir.type, elements(n, pair.ir.type))) for n in (-(2**15), 2**15 - 1))
        c = c + e.min(e.max(pair, low), high)
    return c


# Pairs of bfloat16


def flushed(numbers: Value) -> Value:
    """Returns a vector of float32 with zeros of the same sign for denormal numbers."""
    e = numbers.emitter
    bits = e.bits(numbers)
    kept = e.select((bits & 0x7F800000).equals(0), bits & -(2**31), bits)
    return Value(e, e.builder.bitcast(kept.ir, numbers.ir.type))


def first_and_second(pairs: Value) -> tuple[Value, Value]:
    """Returns the first and the second bfloat16 of each pair as float32, denormal ones as zeros."""
    words = cast(pairs, I32, 1)
    return flushed(cast(words << 16, F32, 1)), flushed(cast(words & -(2**16), F32, 1))


def _second_then_first(a: Value, b: Value, c: Value) -> Value:
    """Adds the second product and then the first one, with one rounding each. Zen 4 does so, to the same bits."""
    (a0, a1), (b0, b1), e = first_and_second(a), first_and_second(b), c.emitter
    return flushed(e.fma(a0, b0, flushed(e.fma(a1, b1, flushed(c)))))


def _sum_to_odd(a: Value, b: Value) -> Value:
    """Returns a + b. If that is no float32, it is the one of its two neighbours whose last bit is 1."""
    e = a.emitter
    total = a + b
    # Made larger, so that what is lost is no denormal number: threads of XLA count these as zeros.
    scale = e.select(e.max(total, e.vector(0) - total) < 1.0, e.vector(2.0**64), e.vector(1))
    x, y = a * scale, b * scale
    part = x + y - x
    lost = (x - (x + y - part)) + (y - part)  # exact: Knuth's two-sum
    bits, toward = e.bits(total), e.bits(total) ^ e.bits(lost)
    moved = e.select(toward < 0, bits - 1, bits + 1)  # away from zero where what is lost has the same sign
    is_even = ((bits & 1).equals(0)).ir
    is_inexact = e.builder.fcmp_ordered("!=", lost.ir, e.vector(0).ir)  # false for NaN, so infinity stays
    chosen = e.select(Value(e, e.builder.and_(is_even, is_inexact)), moved, bits)
    return flushed(Value(e, e.builder.bitcast(chosen.ir, total.ir.type)))


def _sum_of_pair(a: Value, b: Value, c: Value) -> Value:
    """Adds the sum of both products, each sum rounded to odd, as the manuals of ARM64 say (FPCR.EBF = 0)."""
    (a0, a1), (b0, b1) = first_and_second(a), first_and_second(b)
    return _sum_to_odd(flushed(c), _sum_to_odd(flushed(a0 * b0), flushed(a1 * b1)))


_VNNI, _INT8 = "llvm.x86.avx512.vpdpbusd.{bits}", "llvm.x86.avx2.vpdpb{kinds}d.{{bits}}"
_NEON = "llvm.aarch64.neon.{name}.v4i32.v16i8"

# Where several take the same dtypes, the first one that a chip has is its own.
DOTS = (
    Dot(
        "vdpbf16ps", "avx512bf16", (16,), "bfloat16", "bfloat16",
        _instruction("llvm.x86.avx512bf16.dpbf16ps.{bits}", Bfloat(), 2), _second_then_first,
    ),
    Dot(
        "bfdot", "bf16", (4,), "bfloat16", "bfloat16",
        _instruction("llvm.aarch64.neon.bfdot.v4f32.v8bf16", Bfloat(), 2), _sum_of_pair,
    ),
    Dot("vpdpbusd", "avx512vnni", (16,), "uint8", "int8", _instruction(_VNNI, I32, 1), _bytes(False, True)),
    Dot("vpdpbusd", "avxvnni", (4, 8), "uint8", "int8", _instruction(_VNNI, I32, 1), _bytes(False, True)),
    *(
        Dot(
            f"vpdpb{kinds}d", "avxvnniint8", (4, 8), a, b,
            _instruction(_INT8.format(kinds=kinds), I32, 1), _bytes(a == "int8", b == "int8"),
        )
        for kinds, a, b in (("ss", "int8", "int8"), ("uu", "uint8", "uint8"))
    ),
    *(
        Dot(
            name, feature, (4,), a, b, _instruction(_NEON.format(name=name), I8, 4), _bytes(a == "int8", b == "int8"),
        )
        for name, feature, a, b in (
            ("sdot", "dotprod", "int8", "int8"),
            ("udot", "dotprod", "uint8", "uint8"),
            ("usdot", "i8mm", "uint8", "int8"),
        )
    ),
    # Sums of two products have 16 bits, and are cut off there.
    Dot("vpmaddubsw", "avx512bw", (16,), "uint8", "int8", _multiply_and_add_halves, _meaning_of_halves, 127),
    Dot("vpmaddubsw", "avx2", (8,), "uint8", "int8", _multiply_and_add_halves, _meaning_of_halves, 127),
)  # fmt: skip
