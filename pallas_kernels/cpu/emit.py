"""Writes machine code from Python: a kernel is a function that runs once and emits instructions, as in Pallas.

Python's own `for` unrolls, and `Emitter.loop` emits a loop. Values are 64-bit integers (addresses too), float32, or
vectors of these. LLVM may not reorder a sum, so the same emitted sum gives the same bits wherever it stands.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.chips import CpuChip

I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
F32 = ir.FloatType()
# What is in memory becomes float32 when it is loaded, and is rounded when it is stored.
SIZE_OF = {"float32": 4, "bfloat16": 2}

type Number = "Value | int | float"


@dataclass(frozen=True)
class Value:
    """A value that the kernel will have. Python's operators on it emit instructions; integers are signed."""

    emitter: "Emitter"
    ir: Any

    @property
    def _element(self) -> Any:
        return self.ir.type.element if isinstance(self.ir.type, ir.VectorType) else self.ir.type

    def _like(self, number: Number) -> Any:
        return number.ir if isinstance(number, Value) else ir.Constant(self.ir.type, _elements(number, self.ir.type))

    def _binary(self, name: str, other: Number) -> "Value":
        name = f"f{name}" if self._element == F32 else name
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.ir, self._like(other)))

    def _compare(self, sign: str, other: Number) -> "Value":
        builder = self.emitter.builder
        compare = builder.fcmp_ordered if self._element == F32 else builder.icmp_signed
        return Value(self.emitter, compare(sign, self.ir, self._like(other)))

    def __add__(self, other: Number) -> "Value":
        return self._binary("add", other)

    def __sub__(self, other: Number) -> "Value":
        return self._binary("sub", other)

    def __mul__(self, other: Number) -> "Value":
        return self._binary("mul", other)

    def __truediv__(self, other: Number) -> "Value":
        return self._binary("div", other)

    def __floordiv__(self, other: Number) -> "Value":
        """Divides integers that are not negative."""
        return self._binary("udiv", other)

    def __mod__(self, other: Number) -> "Value":
        """Returns the rest of dividing integers that are not negative."""
        return self._binary("urem", other)

    def __and__(self, other: Number) -> "Value":
        return self._binary("and_", other)

    def __or__(self, other: Number) -> "Value":
        return self._binary("or_", other)

    def __lshift__(self, bits: Number) -> "Value":
        return self._binary("shl", bits)

    def __rshift__(self, bits: Number) -> "Value":
        """Moves bits to the right and fills up with zeros."""
        return self._binary("lshr", bits)

    def __lt__(self, other: Number) -> "Value":
        return self._compare("<", other)

    def __le__(self, other: Number) -> "Value":
        return self._compare("<=", other)

    def __gt__(self, other: Number) -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: Number) -> "Value":
        return self._compare(">=", other)

    def equals(self, other: Number) -> "Value":
        """Compares; `==` stays Python's own."""
        return self._compare("==", other)


@dataclass(frozen=True)
class Variable:
    """A place for a value that changes. LLVM keeps it in a register where it can."""

    emitter: "Emitter"
    address: Any

    def get(self) -> Value:
        return Value(self.emitter, self.emitter.builder.load(self.address))

    def set(self, value: Value) -> None:
        self.emitter.builder.store(value.ir, self.address)


class Emitter:
    """Emits the instructions of one function. A vector has as many float32 as the chip's registers, `lanes`."""

    def __init__(self, function: ir.Function, chip: CpuChip):
        self.ir, self.chip, self.lanes = function, chip, chip.lanes
        self.module: ir.Module = function.module
        entry, body = function.append_basic_block("entry"), function.append_basic_block("body")
        self._places = ir.IRBuilder(entry)  # variables must be made before any loop
        self._places.position_before(self._places.branch(body))
        self.builder = ir.IRBuilder(body)

    @property
    def arguments(self) -> list[Value]:
        return [Value(self, argument) for argument in self.ir.args]

    def function(self, name: str, num_arguments: int) -> "Emitter":
        """Begins another function of the same module, of 64-bit arguments, whose end must be `finish`."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * num_arguments)
        function = ir.Function(self.module, kind, self.module.get_unique_name(name))
        function.linkage = "internal"
        return Emitter(function, self.chip)

    def finish(self) -> ir.Function:
        """Ends the function."""
        self.builder.ret_void()
        return self.ir

    # Numbers

    def integer(self, number: int) -> Value:
        return Value(self, ir.Constant(I64, number))

    def number(self, number: float) -> Value:
        return Value(self, ir.Constant(F32, number))

    def vector(self, number: float) -> Value:
        """Returns the float32 `number` in all lanes."""
        return Value(self, ir.Constant(ir.VectorType(F32, self.lanes), [float(number)] * self.lanes))

    def numbered(self, first: Value) -> Value:
        """Returns the integers first, first + 1, ... as a vector."""
        steps = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        return self.splat(first) + Value(self, steps)

    def splat(self, scalar: Value) -> Value:
        """Returns `scalar` in all lanes."""
        vector = ir.VectorType(scalar.ir.type, self.lanes)
        nothing = ir.Constant(vector, ir.Undefined)
        one = self.builder.insert_element(nothing, scalar.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return Value(self, self.builder.shuffle_vector(one, nothing, zeros))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def min(self, a: Value, b: Value) -> Value:
        """Returns the smaller one, and `b` if one is NaN."""
        return self.select(a < b, a, b)

    def max(self, a: Value, b: Value) -> Value:
        """Returns the larger one, and `b` if one is NaN."""
        return self.select(a > b, a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a * b + c, rounded once."""
        return self._intrinsic("fma", a, b, c)

    def log2(self, power: Value) -> Value:
        """Returns the exponent of a power of two."""
        kind = ir.FunctionType(I64, [I64, I1])
        function = self.module.globals.get("llvm.cttz.i64") or ir.Function(self.module, kind, "llvm.cttz.i64")
        return self.call(function, power, Value(self, ir.Constant(I1, True)))

    # Control

    def words(self, count: int) -> Value:
        """Returns the address of `count` 64-bit words on the stack."""
        place = self._places.alloca(ir.ArrayType(I64, count))
        place.align = 64
        return Value(self, self._places.ptrtoint(place, I64))

    def variable(self, value: Value) -> Variable:
        place = Variable(self, self._places.alloca(value.ir.type))
        place.set(value)
        return place

    @contextmanager
    def loop(self, start: Value | int, stop: Value, step: Value | int = 1) -> Iterator[Value]:
        """Emits what follows as the body of a loop, and yields its counter."""
        counter = self.variable(start if isinstance(start, Value) else self.integer(start))
        head, body, after = (self.builder.append_basic_block() for _ in range(3))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((counter.get() < stop).ir, body, after)
        self.builder.position_at_end(body)
        yield counter.get()
        counter.set(counter.get() + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """Emits what follows as the body of a loop, and yields a function: the loop ends when its condition holds."""
        body, after = self.builder.append_basic_block(), self.builder.append_basic_block()

        def end_when(condition: Value) -> None:
            goes_on = self.builder.append_basic_block()
            self.builder.cbranch(condition.ir, after, goes_on)
            self.builder.position_at_end(goes_on)

        self.builder.branch(body)
        self.builder.position_at_end(body)
        yield end_when
        self.builder.branch(body)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emits what follows so that it happens only where `condition` holds."""
        with self.builder.if_then(condition.ir):
            yield

    def call(self, function: ir.Function, *arguments: Value) -> Value:
        return Value(self, self.builder.call(function, [argument.ir for argument in arguments]))

    def call_address(self, address: Value, argument: Value) -> Value:
        """Calls the function at `address`, which takes and returns 64 bits."""
        kind = ir.PointerType(ir.FunctionType(I64, [I64]))
        return Value(self, self.builder.call(self.builder.inttoptr(address.ir, kind), [argument.ir]))

    def call_c(self, name: str, *arguments: Value) -> Value:
        """Calls a function of C's library whose arguments and result are 64 bits."""
        known = self.module.globals.get(name)
        kind = ir.FunctionType(I64, [I64] * len(arguments))
        return self.call(ir.Function(self.module, kind, name) if known is None else known, *arguments)

    def address_of(self, function: ir.Function) -> Value:
        return Value(self, self.builder.ptrtoint(function, I64))

    def relax(self) -> None:
        """Lets the other hyper-thread have the core, where there is one, while this one waits."""
        if self.chip.triple.startswith("x86"):
            name = "llvm.x86.sse2.pause"
            known = self.module.globals.get(name)
            self.call(known or ir.Function(self.module, ir.FunctionType(ir.VoidType(), []), name))

    # Memory

    def _pointer(self, address: Value, kind: Any) -> Any:
        return self.builder.inttoptr(address.ir, ir.PointerType(kind))

    def load_int(self, address: Value, bits: int = 64) -> Value:
        """Loads a signed integer of that many bits."""
        loaded = self.builder.load(self._pointer(address, ir.IntType(bits)), align=bits // 8)
        return Value(self, loaded if bits == 64 else self.builder.sext(loaded, I64))

    def store_int(self, address: Value, value: Value | int) -> None:
        value = value if isinstance(value, Value) else self.integer(value)
        self.builder.store(value.ir, self._pointer(address, I64), align=8)

    def fetch_add(self, address: Value, amount: int) -> Value:
        """Adds to a 64-bit integer, atomically, and returns what it was."""
        pointer = self._pointer(address, I64)
        return Value(self, self.builder.atomic_rmw("add", pointer, ir.Constant(I64, amount), "seq_cst"))

    def load_float(self, address: Value) -> Value:
        return Value(self, self.builder.load(self._pointer(address, F32), align=4))

    def store_float(self, address: Value, value: Value) -> None:
        self.builder.store(value.ir, self._pointer(address, F32), align=4)

    def load(self, address: Value, dtype: str = "float32", mask: Value | None = None) -> Value:
        """Loads a vector of `dtype` as float32. Lanes outside `mask` are 0, and their memory is not read."""
        element = F32 if dtype == "float32" else I16
        loaded = self._load_raw(address, element, self.lanes, mask)
        if dtype == "float32":
            return Value(self, loaded)
        return self.widened(Value(self, loaded))

    def _load_raw(self, address: Value, element: Any, lanes: int, mask: Value | None) -> Any:
        vector = ir.VectorType(element, lanes)
        pointer, align = self._pointer(address, vector), 4 if element == F32 else 2
        if mask is None:
            return self.builder.load(pointer, align=align)
        kind = ir.FunctionType(vector, [pointer.type, I32, ir.VectorType(I1, lanes), vector])
        name = f"llvm.masked.load.v{lanes}{'f32' if element == F32 else 'i16'}.p0"
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        zeros = ir.Constant(vector, _elements(0, vector))
        return self.builder.call(function, [pointer, ir.Constant(I32, align), mask.ir, zeros])

    def widened(self, halves: Value) -> Value:
        """Returns bfloat16, given as 16-bit integers, as float32."""
        wide = self.builder.zext(halves.ir, ir.VectorType(I32, self.lanes))
        moved = self.builder.shl(wide, ir.Constant(wide.type, [16] * self.lanes))
        return Value(self, self.builder.bitcast(moved, ir.VectorType(F32, self.lanes)))

    def store(self, address: Value, value: Value, dtype: str = "float32", mask: Value | None = None) -> None:
        """Stores a vector of any number of lanes as `dtype`, rounded to nearest even, but for lanes outside `mask`."""
        raw = value.ir if dtype == "float32" else self._rounded(value)
        pointer, align = self._pointer(address, raw.type), 4 if dtype == "float32" else 2
        if mask is None:
            self.builder.store(raw, pointer, align=align)
            return
        lanes = raw.type.count
        kind = ir.FunctionType(ir.VoidType(), [raw.type, pointer.type, I32, ir.VectorType(I1, lanes)])
        name = f"llvm.masked.store.v{lanes}{'f32' if dtype == 'float32' else 'i16'}.p0"
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        self.builder.call(function, [raw, pointer, ir.Constant(I32, align), mask.ir])

    def _rounded(self, value: Value) -> Any:
        """Returns the bits of bfloat16 for a vector of float32. A NaN stays a NaN."""
        lanes = value.ir.type.count
        words = ir.VectorType(I32, lanes)
        bits = Value(self, self.builder.bitcast(value.ir, words))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        is_nan = Value(self, self.builder.fcmp_unordered("uno", value.ir, value.ir))
        rounded = self.select(is_nan, bits | 0x400000, rounded)
        return self.builder.trunc((rounded >> 16).ir, ir.VectorType(I16, lanes))

    def prefetch(self, address: Value, level: int = 1) -> None:
        """Asks for the cache line at `address`, which need not exist, in the caches from `level` on."""
        byte = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        name = "llvm.prefetch.p0"
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        numbers = [ir.Constant(I32, number) for number in (0, 4 - level, 1)]  # to read; how near; data
        self.builder.call(function, [self._pointer(address, ir.IntType(8)), *numbers])

    # Vectors

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Returns the lanes of `a` and `b` with these numbers; those of `b` follow those of `a`."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, mask))

    def _interleaved(self, a: Value, b: Value, distance: int) -> tuple[Value, Value]:
        """Returns every other group of `distance` lanes of `a`, with those of `b` between them, and then the rest."""
        lanes = range(self.lanes)
        first = [lane if lane & distance == 0 else self.lanes + lane - distance for lane in lanes]
        second = [lane + distance if lane & distance == 0 else self.lanes + lane for lane in lanes]
        return self.shuffle(a, b, first), self.shuffle(a, b, second)

    def sums(self, vectors: Sequence[Value]) -> Value:
        """Returns a vector whose lane i is the sum of vector i; their number is a power of two, at most `lanes`.

        A vector's sum has the same bits whichever and however many others there are.
        """
        left, distance = list(vectors), 1
        while distance < self.lanes:
            if len(left) > 1:
                left = [self._sum_of_two(a, b, distance) for a, b in zip(left[::2], left[1::2], strict=True)]
            else:
                left = [self._sum_of_two(left[0], left[0], distance)]
            distance *= 2
        return left[0]

    def _sum_of_two(self, a: Value, b: Value, distance: int) -> Value:
        first, second = self._interleaved(a, b, distance)
        return first + second

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Returns the columns of `lanes` rows."""
        columns, distance = list(rows), 1
        while distance < self.lanes:
            for low in range(self.lanes):
                if low & distance == 0:
                    pair = columns[low], columns[low + distance]
                    columns[low], columns[low + distance] = self._interleaved(*pair, distance)
            distance *= 2
        return columns

    def largest(self, vector: Value) -> Value:
        """Returns the largest lane."""
        distance = 1
        while distance < self.lanes:
            vector = self.max(vector, self.shuffle(vector, vector, [lane ^ distance for lane in range(self.lanes)]))
            distance *= 2
        return self.lane(vector, 0)

    def lane(self, vector: Value, number: int) -> Value:
        return Value(self, self.builder.extract_element(vector.ir, ir.Constant(I32, number)))

    def mask(self, count: Value, lanes: int) -> Value:
        """Returns a mask of the first `count` of `lanes` lanes."""
        numbers = Value(self, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))
        zeros = ir.Constant(numbers.ir.type, [0] * lanes)
        nothing = ir.Constant(numbers.ir.type, ir.Undefined)
        one = self.builder.insert_element(nothing, self.builder.trunc(count.ir, I32), ir.Constant(I32, 0))
        return numbers < Value(self, self.builder.shuffle_vector(one, nothing, zeros))

    def load_pairs(self, address: Value, mask: Value | None = None) -> Value:
        """Loads `2 * lanes` bfloat16, for `dot_pairs`."""
        return Value(self, self._load_raw(address, I16, 2 * self.lanes, mask))

    def dot_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """Adds to each lane of `c` the products of a pair of bfloat16 (VDPBF16PS, which takes tiny ones for zero)."""
        pairs = ir.VectorType(_Bfloat(), 2 * self.lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
        kind = ir.FunctionType(c.ir.type, [c.ir.type, pairs, pairs])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.call(function, c, *(Value(self, self.builder.bitcast(x.ir, pairs)) for x in (a, b)))

    def exp(self, x: Value) -> Value:
        """Returns e**x of a vector, with a relative error below 3e-7; below -87 as at -87. NaN stays NaN."""
        x = self.max(self.vector(-87.0), x)
        turns = self._intrinsic("floor", self.fma(x, self.vector(1.44269504), self.vector(0.5)))
        rest = self.fma(turns, self.vector(-0.693359375), x)
        rest = self.fma(turns, self.vector(2.12194440e-4), rest)
        result = self.vector(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):  # Cephes' expf
            result = self.fma(result, rest, self.vector(factor))
        result = self.fma(result, rest * rest, rest + 1.0)
        words = ir.VectorType(I32, self.lanes)
        power = Value(self, self.builder.fptosi(turns.ir, words))
        scale = Value(self, self.builder.bitcast(((power + 127) << 23).ir, turns.ir.type))
        return result * scale

    def tanh(self, x: Value) -> Value:
        """Returns tanh of a vector as 1 - 2 / (e**2x + 1), which is within 3e-7 of it; beyond 40 as at 40."""
        x = self.min(self.vector(40.0), self.max(self.vector(-40.0), x))
        return self.vector(1.0) - self.vector(2.0) / (self.exp(x + x) + 1.0)

    def _intrinsic(self, name: str, *arguments: Value) -> Value:
        """Calls one of LLVM's functions over float32 vectors."""
        vector = arguments[0].ir.type
        name = f"llvm.{name}.v{vector.count}f32"
        kind = ir.FunctionType(vector, [vector] * len(arguments))
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.call(function, *arguments)


class _Bfloat(ir.Type):  # type: ignore[misc]  # llvmlite has no annotations
    """LLVM's bfloat, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


def _elements(number: float, kind: Any) -> Any:
    """Returns `number` as llvmlite wants a constant of that type."""
    if isinstance(kind, ir.VectorType):
        return [_elements(number, kind.element)] * kind.count
    if kind == F32:
        return struct.unpack("f", struct.pack("f", number))[0]
    return int(number)
