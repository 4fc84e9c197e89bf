"""Rounds tokens to integers of eight bits: a kernel for CPUs, whose results `integer_matmul` multiplies by."""

from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.emit import SIZE_OF, Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import I32, Value
from pallas_kernels.cpu.vectors import first_lanes, lane, largest, sums

ROWS = 16  # of an item of work
LARGEST = 127


def round_tokens(e: Emitter, frame: Frame, dtype: str, together: str) -> None:
    """Emits the rounding of x [M, K], by groups of `together` inputs ("row": all of a row).

    Its results are codes i8[M, at least K], sizes f32[M, G], and the sums of each group's codes i32[M, G].
    """
    x, codes, sizes, totals = frame.argument(0), *(frame.result(number) for number in range(3))
    captured = (x.data, codes.data, sizes.data, totals.data, x.size(0), x.size(1), codes.size(1), sizes.size(1))

    def some_rows(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
        x, codes, sizes, totals, M, K, stride, G = captured
        with t.loop(item * ROWS, t.min(item * ROWS + ROWS, M)) as row:
            with t.loop(0, G) as group:
                first = t.integer(0) if together == "row" else group * int(together)
                count = K if together == "row" else t.min(K - first, t.integer(int(together)))
                place = (row * G + group) * 4
                _round(
                    t, x + (row * K + first) * SIZE_OF[dtype], count, dtype,
                    codes + row * stride + first, sizes + place, totals + place,
                )  # fmt: skip

    parallel_loop(e, frame, (x.size(0) + (ROWS - 1)) // ROWS, captured, some_rows)


def _round(t: Emitter, x: Value, count: Value, dtype: str, codes: Value, size: Value, total: Value) -> None:
    """Emits the rounding of one group of `count` inputs. Bytes of codes after the group are overwritten."""
    whole = count // t.lanes * t.lanes
    most, sick = t.variable(t.vector(0)), t.variable(t.vector(0))

    def look(at: Value, mask: Value | None) -> None:
        numbers = t.load(x + at * SIZE_OF[dtype], dtype, mask)
        magnitude = t.intrinsic(f"llvm.fabs.v{t.lanes}f32", numbers.ir.type, numbers)
        most.set(t.max(magnitude, most.get()))
        sick.set(t.fma(numbers, t.vector(0), sick.get()))  # NaN for NaN and infinity

    _over(t, whole, count, look)
    # XLA computes a division by 127 so, too, and the forms' scales are the same.
    least = t.number(float(np.finfo(np.float32).tiny))
    found = largest(most.get())
    scale = t.max(found * float(np.float32(1 / LARGEST)), least)
    scale = t.select(found.equals(0), t.number(1), scale)
    t.store_float(size, scale + lane(sums([sick.get()]), 0))
    words = ir.VectorType(I32, t.lanes)
    total_of = t.variable(Value(t, ir.Constant(words, [0] * t.lanes)))
    divisor = t.splat(scale)

    def put(at: Value, mask: Value | None) -> None:
        numbers = t.load(x + at * SIZE_OF[dtype], dtype, mask) / divisor
        # A NaN becomes a number, too: what is no number has no integer.
        numbers = t.max(numbers, t.vector(-LARGEST))
        numbers = t.min(numbers, t.vector(LARGEST))
        rounded = t.intrinsic(f"llvm.rint.v{t.lanes}f32", numbers.ir.type, numbers)
        integers = Value(t, t.builder.fptosi(rounded.ir, words))
        total_of.set(total_of.get() + integers)
        t.store_narrow(codes + at, integers, 8)

    _over(t, whole, count, put)
    t.store_int(total, Value(t, t.builder.sext(lane(sums([total_of.get()]), 0).ir, ir.IntType(64))), 32)


def _over(t: Emitter, whole: Value, count: Value, body: Callable[[Value, Value | None], None]) -> None:
    """Emits `body` for all vectors of `count` inputs: whole ones without a mask, and the last one with its own."""
    with t.loop(0, whole, t.lanes) as at:
        body(at, None)
    with t.when(whole < count):
        body(whole, first_lanes(count - whole, t.lanes))
