"""Codes of E4M3 as pairs of bfloat16, which all of them are exactly, by tables in registers.

Two tables of 128 bytes have both bytes of the bfloat16 of each code without a sign: five instructions for 64 codes, and
four more make float32 of these. By float16 (`Emitter.float8s`), 64 codes take 28.
"""

from collections.abc import Iterable

import ml_dtypes
import numpy as np

from pallas_kernels.cpu.bytes import looked_up_of_128
from pallas_kernels.cpu.dots import cast
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import I8, Value
from pallas_kernels.cpu.vectors import shuffle

E4M3 = "float8_e4m3fn"
_BFLOATS = np.arange(128).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16).view(np.uint16)
_LOW, _HIGH = (_BFLOATS & 0xFF).tolist(), (_BFLOATS >> 8).tolist()
_SIGNS = -0x7F7F7F80  # the highest bit of each byte of a word


def pairs_of_codes(t: Emitter, codes: Value, places: Iterable[Iterable[int]]) -> list[Value]:
    """Returns vectors of pairs of bfloat16, as words. The chip must have `bytes.has_table_of_128`.

    places: for each vector, the places of the codes of all pairs, first after second, in the 64 bytes at `codes`
    """
    words = t.load_words(codes)
    low = cast(looked_up_of_128(_LOW, words), I8, 4)
    high = cast(looked_up_of_128(_HIGH, words) | (words & _SIGNS), I8, 4)
    both = [[part for place in of_vector for part in (place, 4 * t.lanes + place)] for of_vector in places]
    return [t.bits(shuffle(low, high, part)) for part in both]


def halves_of_pairs(pairs: Value) -> tuple[Value, Value]:
    """Returns the first and the second bfloat16 of each pair, which are words, as float32."""
    t = pairs.emitter
    return t.of_bits(pairs << 16), t.of_bits(pairs & -(2**16))
