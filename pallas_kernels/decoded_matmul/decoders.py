"""Decodes the codes of a panel in registers, a few inputs of each output at a time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pallas_kernels.cpu.bytes import has_table_of_128
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.float8 import E4M3, halves_of_pairs, pairs_of_codes
from pallas_kernels.cpu.float_tables import looked_up_floats
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import narrowed
from pallas_kernels.integer_matmul.code_panels import FLOAT8_UNIT, UNITS, CodePanels


class CodeDecoder(ABC):
    """Makes numbers of codes.

    inputs: whose codes lie together
    size: the bytes of these codes
    """

    inputs: ClassVar[int]
    size: ClassVar[int]

    @abstractmethod
    def floats(self, t: Emitter, codes: Value, columns: int) -> list[Sequence[Value]]:
        """Returns `inputs` inputs of so many outputs, whose codes are at the address `codes`, as float32.

        There is a vector for each input of each vector of outputs.
        """

    @abstractmethod
    def pairs(self, t: Emitter, codes: Value, columns: int) -> list[Value]:
        """Returns two inputs of so many outputs as vectors of pairs of bfloat16."""


@dataclass(frozen=True)
class Float8(CodeDecoder):
    """Two numbers of E4M3, all of which are bfloat16, too.

    Where a CPU has no tables for it (`cpu.float8`), codes become float16 and then float32, whose upper half is a
    bfloat16.
    """

    inputs = FLOAT8_UNIT
    size = FLOAT8_UNIT

    def floats(self, t: Emitter, codes: Value, columns: int) -> list[Sequence[Value]]:
        if has_table_of_128(t.chip):
            return [halves_of_pairs(pairs) for pairs in self.pairs(t, codes, columns)]
        both = [t.load_halves(codes + first * 2) for first in range(0, columns, t.lanes)]
        return [(t.float8s(narrowed(one, 8), E4M3), t.float8s(narrowed(one >> 8, 8), E4M3)) for one in both]

    def pairs(self, t: Emitter, codes: Value, columns: int) -> list[Value]:
        if not has_table_of_128(t.chip):
            floats = self.floats(t, codes, columns)
            return [(t.bits(first) >> 16) | (t.bits(second) & -(2**16)) for first, second in floats]
        places = range(2 * t.lanes), range(2 * t.lanes, 4 * t.lanes)
        firsts = range(0, columns, 2 * t.lanes)
        return [pairs for first in firsts for pairs in pairs_of_codes(t, codes + first * 2, places)]


@dataclass(frozen=True)
class OfTable(CodeDecoder):
    """Eight codes of four bits in a word, which are places in a table of float32."""

    table: tuple[float, ...]
    inputs = UNITS[4]
    size = UNITS[4] // 2

    def floats(self, t: Emitter, codes: Value, columns: int) -> list[Sequence[Value]]:
        words = [t.load_words(codes + first * self.size) for first in range(0, columns, t.lanes)]
        # A byte has one of the first four inputs in its lower half, and one of the next four in its upper half.
        bits = [8 * place + half for half in (0, 4) for place in range(4)]
        return [[looked_up_floats(self.table, word, bit) for bit in bits] for word in words]

    def pairs(self, t: Emitter, codes: Value, columns: int) -> list[Value]:
        raise NotImplementedError("numbers of a table are no bfloat16: give the kernel rows of float32")


def decoder_of(panels: CodePanels) -> CodeDecoder:
    """Returns what decodes panels whose codes are no integers."""
    if panels.is_float8:
        return Float8()
    assert panels.looked_up is not None, panels
    return OfTable(tuple(panels.looked_up.table[:16].tolist()))
