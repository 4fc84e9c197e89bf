"""Writes machine code from Python: a kernel is a function that runs once and emits instructions, as in Pallas.

Python's own `for` unrolls, and `Emitter.loop` emits a loop. LLVM may not reorder a sum, so the same emitted sum gives
the same bits wherever it stands.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.values import F32, I1, I8, I16, I32, I64, Value, Variable, elements

# What is in memory becomes float32 when it is loaded, and is rounded when it is stored. One byte is only loaded.
SIZE_OF = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
_ELEMENTS = {"float32": F32, "bfloat16": I16, "int8": I8, "float8_e4m3fn": I8, "float8_e5m2": I8}


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
        """Begins another function of the same module, of 64-bit arguments, whose end must be `finish`.

        It stays a function, so that nothing around it takes registers from it: inlined, the tiles of a grouped product
        kept some of their sums in memory, and 2048 rows in 32 groups took 3.8 ms and not 3.0 (512x256, Zen 4, float32).
        """
        kind = ir.FunctionType(ir.VoidType(), [I64] * num_arguments)
        function = ir.Function(self.module, kind, self.module.get_unique_name(name))
        function.linkage = "internal"
        function.attributes.add("noinline")
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

    def floats(self, integers: Value) -> Value:
        """Returns a vector of signed integers, which fit 32 bits, as float32."""
        # Only AVX-512 has an instruction for those of 64 bits.
        narrow = self.builder.trunc(integers.ir, ir.VectorType(I32, self.lanes))
        return Value(self, self.builder.sitofp(narrow, ir.VectorType(F32, self.lanes)))

    def bits(self, numbers: Value) -> Value:
        """Returns the bits of a vector of float32, as integers of 32 bits."""
        return Value(self, self.builder.bitcast(numbers.ir, ir.VectorType(I32, self.lanes)))

    def of_bits(self, integers: Value) -> Value:
        """Returns a vector of float32 with these bits, which are integers of 32 bits."""
        return Value(self, self.builder.bitcast(integers.ir, ir.VectorType(F32, self.lanes)))

    def wide(self, integers: Value) -> Value:
        """Returns a vector of signed integers as such of 64 bits."""
        return Value(self, self.builder.sext(integers.ir, ir.VectorType(I64, self.lanes)))

    def splat(self, scalar: Value) -> Value:
        """Returns `scalar` in all lanes."""
        vector = ir.VectorType(scalar.ir.type, self.lanes)
        nothing = ir.Constant(vector, ir.Undefined)
        one = self.builder.insert_element(nothing, scalar.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return Value(self, self.builder.shuffle_vector(one, nothing, zeros))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def any(self, conditions: Value) -> Value:
        """Returns whether one of a vector's conditions holds."""
        bits = self.builder.bitcast(conditions.ir, ir.IntType(conditions.ir.type.count))
        return Value(self, self.builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0)))

    def min(self, a: Value, b: Value) -> Value:
        """Returns the smaller one, and `b` if one is NaN."""
        return self.select(a < b, a, b)

    def max(self, a: Value, b: Value) -> Value:
        """Returns the larger one, and `b` if one is NaN."""
        return self.select(a > b, a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a * b + c, rounded once."""
        kind = a.ir.type
        return self.intrinsic(f"llvm.fma.v{kind.count}f32", kind, a, b, c)

    def log2(self, power: Value) -> Value:
        """Returns the exponent of a power of two."""
        return self.intrinsic("llvm.cttz.i64", I64, power, Value(self, ir.Constant(I1, True)))

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

    def groups(self, sizes: Sequence[int], count: Value) -> Iterator[tuple[int, Value]]:
        """Emits the body of Python's `for` once for each size: a loop over groups of so many of `count` things.

        Each loop goes on where the one before had too few left. Yields the size, and the first thing of the group.
        """
        done = self.variable(self.integer(0))
        for size in sizes:
            with self.loop(done.get(), count - (size - 1), size) as first:
                yield size, first
                done.set(first + size)

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
        return self.intrinsic(name, I64, *arguments)

    def intrinsic(self, name: str, result: Any, *arguments: Value) -> Value:
        """Calls a function that LLVM or the process knows by `name`, which returns the type `result`."""
        kind = ir.FunctionType(result, [argument.ir.type for argument in arguments])
        return self.call(self.module.globals.get(name) or ir.Function(self.module, kind, name), *arguments)

    def address_of(self, function: ir.Function) -> Value:
        return Value(self, self.builder.ptrtoint(function, I64))

    def relax(self) -> None:
        """Lets the other hyper-thread have the core, where there is one, while this one waits."""
        if self.chip.triple.startswith("x86"):
            self.intrinsic("llvm.x86.sse2.pause", ir.VoidType())

    # Memory

    def _pointer(self, address: Value, kind: Any) -> Any:
        return self.builder.inttoptr(address.ir, ir.PointerType(kind))

    def load_int(self, address: Value, bits: int = 64) -> Value:
        """Loads a signed integer of that many bits."""
        loaded = self.builder.load(self._pointer(address, ir.IntType(bits)), align=bits // 8)
        return Value(self, loaded if bits == 64 else self.builder.sext(loaded, I64))

    def store_int(self, address: Value, value: Value | int, bits: int = 64) -> None:
        """Stores the lowest `bits` of an integer."""
        stored = (value if isinstance(value, Value) else self.integer(value)).ir
        kind = ir.IntType(bits)
        stored = stored if bits == 64 else self.builder.trunc(stored, kind)
        self.builder.store(stored, self._pointer(address, kind), align=bits // 8)

    def fetch_add(self, address: Value, amount: int) -> Value:
        """Adds to a 64-bit integer, atomically, and returns what it was."""
        pointer = self._pointer(address, I64)
        return Value(self, self.builder.atomic_rmw("add", pointer, ir.Constant(I64, amount), "seq_cst"))

    def load_float(self, address: Value) -> Value:
        return Value(self, self.builder.load(self._pointer(address, F32), align=4))

    def store_float(self, address: Value, value: Value) -> None:
        self.builder.store(value.ir, self._pointer(address, F32), align=4)

    def load_everywhere(self, address: Value, dtype: str = "float32") -> Value:
        """Loads one float32 or bfloat16 as float32, in all lanes."""
        if dtype == "float32":
            return self.splat(self.load_float(address))
        wide = self.builder.zext(self.builder.load(self._pointer(address, I16), align=2), I32)
        number = self.builder.bitcast(self.builder.shl(wide, ir.Constant(I32, 16)), F32)
        return self.splat(Value(self, number))

    def load_pair_everywhere(self, address: Value, count: int = 2) -> Value:
        """Loads one or two bfloat16 (`count`; zero for the other) in all pairs of a vector, as `load_pairs` does."""
        kind = ir.IntType(16 * count)
        word = self.builder.load(self._pointer(address, kind), align=2)
        pairs = self.splat(Value(self, word if count == 2 else self.builder.zext(word, I32)))
        return Value(self, self.builder.bitcast(pairs.ir, ir.VectorType(I16, 2 * self.lanes)))

    def load_words(self, address: Value, bits: int = 32) -> Value:
        """Loads a vector of integers of so many bits, which are not negative, as integers of 32 bits."""
        loaded = self._load_raw(address, ir.IntType(bits), self.lanes, None)
        return Value(self, loaded if bits == 32 else self.builder.zext(loaded, ir.VectorType(I32, self.lanes)))

    def splat_word(self, address: Value) -> Value:
        """Returns the integer of 32 bits at `address` in all lanes."""
        return self.splat(Value(self, self.builder.load(self._pointer(address, I32), align=1)))

    def store_narrow(self, address: Value, words: Value, bits: int) -> None:
        """Stores the lowest `bits` of a vector of integers."""
        narrow = self.builder.trunc(words.ir, ir.VectorType(ir.IntType(bits), words.ir.type.count))
        self.builder.store(narrow, self._pointer(address, narrow.type), align=bits // 8)

    def load(self, address: Value, dtype: str = "float32", mask: Value | None = None) -> Value:
        """Loads a vector of `dtype` as float32. Lanes outside `mask` are 0, and their memory is not read."""
        loaded = self._load_raw(address, _ELEMENTS[dtype], self.lanes, mask)
        if dtype == "float32":
            return Value(self, loaded)
        if dtype == "int8":
            whole = self.builder.sext(loaded, ir.VectorType(I32, self.lanes))
            return Value(self, self.builder.sitofp(whole, ir.VectorType(F32, self.lanes)))
        if dtype in ("float8_e4m3fn", "float8_e5m2"):
            return self.float8s(Value(self, loaded), dtype)
        return self._widened(Value(self, loaded))

    def _load_raw(self, address: Value, element: Any, lanes: int, mask: Value | None) -> Any:
        vector = ir.VectorType(element, lanes)
        pointer, align = self._pointer(address, vector), 4 if element == F32 else element.width // 8
        if mask is None:
            return self.builder.load(pointer, align=align)
        name = f"llvm.masked.load.v{lanes}{'f32' if element == F32 else f'i{element.width}'}.p0"
        zeros = ir.Constant(vector, elements(0, vector))
        others = (Value(self, pointer), Value(self, ir.Constant(I32, align)), mask, Value(self, zeros))
        return self.intrinsic(name, vector, *others).ir

    def _widened(self, halves: Value) -> Value:
        """Returns bfloat16, given as 16-bit integers, as float32."""
        wide = self.builder.zext(halves.ir, ir.VectorType(I32, self.lanes))
        moved = self.builder.shl(wide, ir.Constant(wide.type, [16] * self.lanes))
        return Value(self, self.builder.bitcast(moved, ir.VectorType(F32, self.lanes)))

    def float8s(self, codes: Value, dtype: str) -> Value:
        """Returns codes of float8, given as bytes, as float32.

        They become float16 first. Its denormal numbers are converted even by threads that count those of float32 as
        zeros, and no float32 on the way is denormal.
        """
        halves, floats = ir.VectorType(I16, self.lanes), ir.VectorType(F32, self.lanes)
        bits = Value(self, self.builder.sext(codes.ir, halves))
        if dtype == "float8_e5m2":
            bits = bits << 8  # the upper half of a float16
        else:
            # Its exponent has a bit less, which the sign fills here, and another bias. Only all ones are no number.
            nan = Value(self, ir.Constant(halves, [0x7E00] * self.lanes))
            bits = self.select((codes & 0x7F).equals(0x7F), nan, (bits << 7) & 0xBFFF)
        exact = self.builder.bitcast(bits.ir, ir.VectorType(ir.HalfType(), self.lanes))
        number = Value(self, self.builder.fpext(exact, floats))
        return number if dtype == "float8_e5m2" else number * 2.0**8

    def store(self, address: Value, value: Value, dtype: str = "float32", mask: Value | None = None) -> None:
        """Stores a vector of any number of lanes as `dtype`, rounded to the nearest even. `mask` leaves lanes out."""
        raw = value.ir if dtype == "float32" else self.rounded_halves(value).ir
        pointer, align = self._pointer(address, raw.type), SIZE_OF[dtype]
        if mask is None:
            self.builder.store(raw, pointer, align=align)
            return
        name = f"llvm.masked.store.v{raw.type.count}{'f32' if dtype == 'float32' else 'i16'}.p0"
        others = (Value(self, raw), Value(self, pointer), Value(self, ir.Constant(I32, align)), mask)
        self.intrinsic(name, ir.VoidType(), *others)

    def rounded_halves(self, value: Value) -> Value:
        """Returns a vector of float32 as bfloat16 in 16-bit integers. A NaN stays a NaN."""
        lanes = value.ir.type.count
        words = ir.VectorType(I32, lanes)
        bits = Value(self, self.builder.bitcast(value.ir, words))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        is_nan = Value(self, self.builder.fcmp_unordered("uno", value.ir, value.ir))
        rounded = self.select(is_nan, bits | 0x400000, rounded)
        return Value(self, self.builder.trunc((rounded >> 16).ir, ir.VectorType(I16, lanes)))

    def prefetch(self, address: Value, level: int = 1) -> None:
        """Asks for the cache line at `address`, which need not exist, in the caches from `level` on."""
        pointer = self._pointer(address, ir.IntType(8))
        numbers = [ir.Constant(I32, number) for number in (0, 4 - level, 1)]  # to read; how near; data
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), *(Value(self, x) for x in (pointer, *numbers)))

    def load_pairs(self, address: Value, mask: Value | None = None) -> Value:
        """Loads `2 * lanes` bfloat16, for `vectors.dot_pairs`."""
        return Value(self, self._load_raw(address, I16, 2 * self.lanes, mask))

    def load_halves(self, address: Value, mask: Value | None = None) -> Value:
        """Loads `lanes` numbers of 16 bits as integers."""
        return Value(self, self._load_raw(address, I16, self.lanes, mask))

    def store_halves(self, address: Value, halves: Value) -> None:
        """Stores integers of 16 bits, any number of them."""
        self.builder.store(halves.ir, self._pointer(address, halves.ir.type), align=2)
