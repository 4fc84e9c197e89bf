"""Packs matrices by a kernel: XLA and NumPy turn words round one at a time, which takes longer than to read a file."""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.cpu.pool import parallel_loop
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import first_lanes, transposed
from pallas_kernels.packed_matmul.panels import WORD, Panels


def pack(matrix: jax.Array, chip: CpuChip) -> jax.Array:
    """Returns a matrix [.., out, in] in the panels in which `chip` reads its dtype: a new array, `Panels.packed`."""
    panels = Panels.of(chip, matrix.dtype)
    *others, outs, ins = matrix.shape
    if missing := -ins % panels.depth:
        matrix = jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, missing)])
    out = jax.ShapeDtypeStruct((prod(others), *panels.shape(outs, ins)), matrix.dtype)
    handler = Handler(pack_words, (str(panels.depth),), chip)
    result: jax.Array = handler(out, matrix.reshape(prod(others), outs, ins + missing))
    return result.reshape(panels.shape(*matrix.shape))


def pack_words(e: Emitter, frame: Frame, depth: str) -> None:
    """Emits panels [A, panels(N), K, columns] of a matrix [A, N, K], both of words of `depth` elements."""
    matrix, packed = frame.argument(0), frame.result(0)
    num_panels, words = packed.size(1), packed.size(2)
    captured = (matrix.data, packed.data, matrix.size(1), words, num_panels)
    parallel_loop(e, frame, matrix.size(0) * num_panels, captured, _panel)


def _panel(t: Emitter, item: Value, captured: Sequence[Value]) -> None:
    matrix, packed, N, K, num_panels = captured
    columns = t.chip.panel_columns
    row = item % num_panels * columns
    read = matrix + (item // num_panels * N + row) * K * WORD
    written = packed + item * K * (columns * WORD)
    nothing = t.integer(0)
    with t.loop(0, K, t.lanes) as k:
        with t.loop(0, t.integer(columns), t.lanes) as first:
            rows = []
            for number in range(t.lanes):
                of_row = first + number
                is_row = row + of_row < N
                here = t.select(is_row, read + (of_row * K + k) * WORD, read)
                rows.append(t.load(here, mask=first_lanes(t.select(is_row, K - k, nothing), t.lanes)))
            for number, column in enumerate(transposed(rows)):
                with t.when(K - k > number):
                    t.store(written + ((k + number) * columns + first) * WORD, column)
