"""Tables of 16 float32 that vectors of codes are places in."""

import struct
from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.cpu.bytes import looked_up, signed_bytes
from pallas_kernels.cpu.values import F32, Value, elements

SIZE = 16


def looked_up_floats(table: Sequence[float], words: Value, bit: int) -> Value:
    """Returns for each lane the number of the table at the place that four bits of its word tell, from `bit` on.

    AVX-512 has an instruction for 16 places and AVX2 one for 8. Elsewhere the four bytes of a number are looked up.
    """
    e = words.emitter
    places = words >> bit if bit else words
    floats = ir.VectorType(F32, e.lanes)
    if e.lanes == 4:
        return _by_bytes(table, places & (SIZE - 1))
    name = {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"}[e.lanes]
    found = []
    for first in range(0, SIZE, e.lanes):
        numbers = ir.Constant(floats, [elements(number, F32) for number in table[first : first + e.lanes]])
        found.append(e.intrinsic(name, floats, Value(e, numbers), places))
    return found[0] if len(found) == 1 else e.select((places & e.lanes).equals(0), *found)


def _by_bytes(table: Sequence[float], places: Value) -> Value:
    e = places.emitter
    numbers = [struct.pack("<f", number) for number in table]
    word = None
    for byte in range(4):
        part = looked_up(signed_bytes([number[byte] for number in numbers]), places) & 0xFF
        moved = part << 8 * byte if byte else part
        word = moved if word is None else word | moved
    assert word is not None
    return e.of_bits(word)
