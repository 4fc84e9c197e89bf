"""Functions of vectors, emitted as instructions: sums and maxima across lanes, transposition, e**x."""

from collections.abc import Callable, Sequence

from llvmlite import ir

from pallas_kernels.cpu.dots import Bfloat, dot_for
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import F32, I16, I32, Value


def shuffle(a: Value, b: Value, lanes: Sequence[int]) -> Value:
    """Returns the lanes of `a` and `b` with these numbers; those of `b` follow those of `a`."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return Value(a.emitter, a.emitter.builder.shuffle_vector(a.ir, b.ir, mask))


def lane(vector: Value, number: int) -> Value:
    return Value(vector.emitter, vector.emitter.builder.extract_element(vector.ir, ir.Constant(I32, number)))


def sums(vectors: Sequence[Value]) -> Value:
    """Returns a vector whose lane i is the sum of vector i. Their number is a power of two, at most that of the lanes.

    A vector's sum has the same bits whichever and however many others there are. Lanes without a vector repeat the
    others.
    """
    return _across(vectors, lambda a, b: a + b)


def maxima(vectors: Sequence[Value]) -> Value:
    """Returns a vector whose lane i is the largest lane of vector i, as `sums` does with sums."""
    return _across(vectors, vectors[0].emitter.max)


def _across(vectors: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    left, distance = list(vectors), 1
    while distance < vectors[0].emitter.lanes:
        if len(left) == 1:
            left *= 2
        left = [combine(*_interleaved(a, b, distance)) for a, b in zip(left[::2], left[1::2], strict=True)]
        distance *= 2
    return left[0]


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Returns the columns of as many rows as a vector has lanes."""
    columns, distance = list(rows), 1
    while distance < len(rows):
        for low in range(len(rows)):
            if low & distance == 0:
                pair = columns[low], columns[low + distance]
                columns[low], columns[low + distance] = _interleaved(*pair, distance)
        distance *= 2
    return columns


def _interleaved(a: Value, b: Value, distance: int) -> tuple[Value, Value]:
    """Returns every other group of `distance` lanes of `a`, with those of `b` between them, and then the rest."""
    count = a.emitter.lanes
    first = [i if i & distance == 0 else count + i - distance for i in range(count)]
    second = [i + distance if i & distance == 0 else count + i for i in range(count)]
    return shuffle(a, b, first), shuffle(a, b, second)


def largest(vector: Value) -> Value:
    """Returns the largest lane."""
    e, distance = vector.emitter, 1
    while distance < e.lanes:
        vector = e.max(vector, shuffle(vector, vector, [i ^ distance for i in range(e.lanes)]))
        distance *= 2
    return lane(vector, 0)


def narrowed(integers: Value, bits: int) -> Value:
    """Returns the lowest `bits` of each integer of a vector."""
    kind = ir.VectorType(ir.IntType(bits), integers.ir.type.count)
    return Value(integers.emitter, integers.emitter.builder.trunc(integers.ir, kind))


def first_lanes(count: Value, lanes: int) -> Value:
    """Returns a mask of the first `count` of `lanes` lanes."""
    e = count.emitter
    numbers = Value(e, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))
    nothing, zeros = ir.Constant(numbers.ir.type, ir.Undefined), ir.Constant(numbers.ir.type, [0] * lanes)
    one = e.builder.insert_element(nothing, e.builder.trunc(count.ir, I32), ir.Constant(I32, 0))
    return numbers < Value(e, e.builder.shuffle_vector(one, nothing, zeros))


def dot_pairs(a: Value, b: Value, c: Value) -> Value:
    """Adds to each lane of `c` the products of a pair of bfloat16. The chip must have an instruction for that."""
    dot = dot_for(c.emitter.chip, "bfloat16", "bfloat16")
    assert dot is not None, "kernels ask for has_bf16_dot first"
    return dot(a, b, c)


def bfloat16_pairs(first: Value, second: Value) -> Value:
    """Returns a vector whose lanes have the bits of two bfloat16 each, of vectors that have them as float32."""
    e = first.emitter
    return e.of_bits((e.bits(first) >> 16) | e.bits(second))


def load_scales(e: Emitter, address: Value, dtype: str) -> Value:
    """Loads a vector of scales of any dtype that matrices of few bits have, as float32."""
    floats = ir.VectorType(F32, e.lanes)
    if dtype == "float16":
        halves = e.builder.bitcast(e.load_halves(address).ir, ir.VectorType(ir.HalfType(), e.lanes))
        return Value(e, e.builder.fpext(halves, floats))
    if dtype == "float8_e8m0fnu":
        return e.of_bits(e.load_words(address, 8) << 23)
    if dtype == "uint8":
        return Value(e, e.builder.sitofp(e.load_words(address, 8).ir, floats))
    return e.load(address, dtype)


def bfloat16s(x: Value) -> Value:
    """Returns a vector of float32 as bfloat16 in 16-bit integers, rounded to the nearest even.

    VCVTNEPS2BF16, where a CPU has it with VDPBF16PS, takes tiny numbers for zero.
    """
    e = x.emitter
    if "+avx512bf16" not in e.chip.features.split(","):
        return e.rounded_halves(x)
    rounded = e.intrinsic(f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * e.lanes}", ir.VectorType(Bfloat(), e.lanes), x)
    return Value(e, e.builder.bitcast(rounded.ir, ir.VectorType(I16, e.lanes)))


def exp(x: Value) -> Value:
    """Returns e**x of a vector, with a relative error below 3e-7; beyond -87 and 88 as there. NaN stays NaN."""
    e = x.emitter
    x = e.min(e.vector(88.0), e.max(e.vector(-87.0), x))
    shifted = e.fma(x, e.vector(1.44269504), e.vector(0.5))
    turns = e.intrinsic(f"llvm.floor.v{e.lanes}f32", x.ir.type, shifted)
    rest = e.fma(turns, e.vector(-0.693359375), x)
    rest = e.fma(turns, e.vector(2.12194440e-4), rest)
    result = e.vector(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):  # Cephes' expf
        result = e.fma(result, rest, e.vector(factor))
    result = e.fma(result, rest * rest, rest + 1.0)
    power = Value(e, e.builder.fptosi(turns.ir, ir.VectorType(I32, e.lanes)))
    return result * Value(e, e.builder.bitcast(((power + 127) << 23).ir, turns.ir.type))


def exp2(x: Value) -> Value:
    """Returns 2**x of a vector up to 127, with a relative error below 3e-7; of 0 it is 1, and below -126 0.

    NaN stays NaN.
    """
    e = x.emitter
    turns = e.intrinsic(f"llvm.rint.v{e.lanes}f32", x.ir.type, x)
    rest = x - turns
    result = e.vector(1.326472615e-3)
    for factor in (9.671512991e-3, 5.550733581e-2, 2.4022242427e-1, 6.931470037e-1, 1.0):  # the least relative error
        result = e.fma(result, rest, e.vector(factor))
    if e.chip.has_scale:
        result = scaled(result, turns)
    else:
        power = Value(e, e.builder.fptosi(turns.ir, ir.VectorType(I32, e.lanes)))
        result = result * Value(e, e.builder.bitcast(((power + 127) << 23).ir, x.ir.type))
    return e.select(x < e.vector(-126.0), e.vector(0.0), result)


def scaled(x: Value, powers: Value) -> Value:
    """Returns x * 2**powers, of powers without a fraction (VSCALEFPS)."""
    e, every, current = x.emitter, ir.Constant(I16, -1), ir.Constant(I32, 4)
    name = f"llvm.x86.avx512.mask.scalef.ps.{32 * e.lanes}"
    return e.intrinsic(name, x.ir.type, x, powers, x, Value(e, every), Value(e, current))


def tanh(x: Value) -> Value:
    """Returns tanh of a vector as 1 - 2 / (e**2x + 1), which is within 3e-7 of it; beyond 40 as at 40."""
    e = x.emitter
    x = e.min(e.vector(40.0), e.max(e.vector(-40.0), x))
    return e.vector(1.0) - e.vector(2.0) / (exp(x + x) + 1.0)


def silu(x: Value) -> Value:
    """Returns x / (1 + e**-x)."""
    e = x.emitter
    return x / (exp(e.vector(0.0) - x) + 1.0)


def gelu_tanh(x: Value) -> Value:
    """Returns the approximation of GELU by tanh (arXiv 1606.08415)."""
    e = x.emitter
    inner = e.fma(x * x * x, e.vector(0.044715), x) * e.vector(0.7978845608)
    return x * e.vector(0.5) * (tanh(inner) + 1.0)
