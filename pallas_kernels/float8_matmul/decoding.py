"""Decodes the codes of a panel, two inputs of each output at a time.

Where a CPU has no tables for it (`cpu.float8`), codes become float16 and then float32, whose upper half is a bfloat16.
"""

from pallas_kernels.cpu.bytes import has_table_of_128
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.float8 import E4M3, halves_of_pairs, pairs_of_codes
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import narrowed


def decoded_pairs(t: Emitter, codes: Value, columns: int) -> list[Value]:
    """Returns two inputs of so many outputs, whose codes are at the address `codes`: vectors of pairs of bfloat16."""
    if not has_table_of_128(t.chip):
        floats = decoded_floats(t, codes, columns)
        return [(t.bits(first) >> 16) | (t.bits(second) & -(2**16)) for first, second in floats]
    places = range(2 * t.lanes), range(2 * t.lanes, 4 * t.lanes)
    return [pairs for first in range(0, columns, 2 * t.lanes) for pairs in pairs_of_codes(t, codes + first * 2, places)]


def decoded_floats(t: Emitter, codes: Value, columns: int) -> list[tuple[Value, Value]]:
    """Returns the same as vectors of float32, of the first and of the second input."""
    if has_table_of_128(t.chip):
        return [halves_of_pairs(pairs) for pairs in decoded_pairs(t, codes, columns)]
    both = [t.load_halves(codes + first * 2) for first in range(0, columns, t.lanes)]
    return [(t.float8s(narrowed(one, 8), E4M3), t.float8s(narrowed(one >> 8, 8), E4M3)) for one in both]
