"""`CodePanels`: how a matrix of integers with scales lies in memory for the kernel that multiplies by it."""

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from pallas_kernels.packed_matmul.panels import Panels
from pallas_kernels.quantized_matmul.code import Code, NumberTable

CODES, HIGH, SCALES, FACTORS, ZEROS, MINS, MIN_FACTORS = (
    "codes", "high", "scales", "factors", "zeros", "mins", "min_factors",
)  # fmt: skip
# The most inputs of a token that are rounded to integers with one size.
MOST_TOGETHER = 128
# The bytes of a scale, by its dtype.
SCALE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e8m0fnu": 1, "float8_e4m3fn": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
# The inputs whose codes lie together, by the bits of a code.
UNITS = {4: 8, 5: 32, 6: 16, 8: 4}
FLOAT8_UNIT = 2
Offsets = Literal["none", "zeros", "mins"]


@dataclass(frozen=True)
class CodePanels:
    """A matrix [.., out, in] whose elements are (code - zero) * scale lies in panels of `columns` outputs.

    The arrays, whose last panel and last inputs are filled up with zeros, are:

        codes       u8[.., panels, in / 4, columns, 4]    eight bits of integers
        codes       u8[.., panels, in / 2, columns, 2]    eight bits of FP8
        codes       u8[.., panels, in / 8, columns, 4]    the lower four bits; byte i of eight inputs has input i in its
                                                          low half, and input 4 + i in its high half
        high        u8[.., panels, in / 32, columns, 4]   the fifth bits of 32 inputs; byte i has that of input 4 j + i
                                                          in bit j
        high        u8[.., panels, in / 16, columns, 4]   the highest two of six bits of 16 inputs; byte i has those of
                                                          input 4 j + i in bits 2 j and 2 j + 1
        scales      [.., panels, in / group, columns]     in `scale_dtype`, or one for all inputs of a row
        zeros       u8[.., panels, in / group, columns]   the codes that stand for 0, where `offsets` is "zeros"
        factors     f16[.., panels, in / span, columns]   by which scales are multiplied, which are integers then
        mins        [.., panels, in / group, columns]     where `offsets` is "mins", an element is
        min_factors f16[.., panels, in / span, columns]   (code - zero) * scale * factor - min * min_factor; mins are
                                                          integers u8 then, and of `scale_dtype` without factors

    bits: of a code: 4, 5, 6 or 8
    group: the inputs that share a scale, or None: all of a row
    zero: the code that stands for 0 everywhere
    span: the inputs that share a factor, or None: there are no factors
    looked_up: codes of four bits stand for the numbers of this table (`quantized_matmul.code.Code`), or None. Where
        these are no integers, tokens are multiplied as they are
    is_float8: codes of eight bits are numbers of E4M3 (`quantized_matmul.code.E4M3`), by which tokens are multiplied as
        they are
    by_row: whether tokens are rounded with one size for all of their inputs, which share a scale then
    """

    columns: int
    bits: int
    group: int | None
    scale_dtype: str
    zero: int = 0
    offsets: Offsets = "none"
    span: int | None = None
    looked_up: Code | None = None
    is_float8: bool = False
    by_row: bool = False

    def __post_init__(self) -> None:
        assert self.bits in (4, 5, 6, 8), self.bits
        assert self.bits == 8 or not self.is_float8, self.bits
        assert self.looked_up is None or (self.looked_up.values is not None and self.bits == 4), self.looked_up
        assert self.group is None or self.group % self.unit == 0, (self.bits, self.group)
        assert self.group is None or not self.by_row, "groups of tokens are groups of the matrix"
        assert self.span is None or self.group is None or self.span % self.group == 0, (self.group, self.span)

    def __str__(self) -> str:
        """Returns a text that tells it apart from others, of letters and digits."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return "_".join(f"{name}_{value.name if isinstance(value, Code) else value}" for name, value in values.items())

    @property
    def number_table(self) -> NumberTable | None:
        """The numbers that codes of four bits stand for, if they are integers that are looked up."""
        return None if self.looked_up is None else self.looked_up.number_table

    @property
    def unit(self) -> int:
        """The inputs whose codes lie together, of which a group has a multiple."""
        return FLOAT8_UNIT if self.is_float8 else UNITS[self.bits]

    @property
    def together(self) -> int | None:
        """The number of inputs of a token that are rounded with one size, or None, which stands for all of them."""
        if self.by_row:
            return None
        if self.group is None:
            return MOST_TOGETHER
        return self.group if self.group < MOST_TOGETHER else math.gcd(self.group, MOST_TOGETHER)

    @property
    def held_scales(self) -> str:
        """The dtype of the array of scales. XLA:CPU converts arrays of float8 before it slices them, and no bytes."""
        return "uint8" if self.scale_dtype.startswith("float8") else self.scale_dtype

    @property
    def held_mins(self) -> str:
        """The dtype of the array of mins."""
        return "uint8" if self.span is not None else self.held_scales

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, in the order in which the kernel takes them."""
        return tuple(self.arrays(1, 1))

    def arrays(self, outs: int, ins: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the shape and the dtype of each array of a matrix [outs, ins], in the order of the kernel."""
        panels = -(-outs // self.columns)
        groups = 1 if self.group is None else -(-ins // self.group)
        of_groups = (panels, groups, self.columns)
        inputs = -(-ins // self.unit) * self.unit
        depth, held = (self.unit, self.unit) if self.bits == 8 else (8, 4)
        found = {CODES: (Panels(self.columns, depth).shape(outs, inputs)[:-1] + (held,), "uint8")}
        if self.bits in (5, 6):
            found[HIGH] = ((panels, inputs // self.unit, self.columns, 4), "uint8")
        found[SCALES] = (of_groups, self.held_scales)
        if self.span is not None:
            found[FACTORS] = ((panels, -(-ins // self.span), self.columns), "float16")
        if self.offsets == "zeros":
            found[ZEROS] = (of_groups, "uint8")
        if self.offsets == "mins":
            found[MINS] = (of_groups, self.held_mins)
            if self.span is not None:
                found[MIN_FACTORS] = found[FACTORS]
        return found

    def packed_codes(self, codes: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the arrays of codes u8[.., out, in], which are new."""
        *others, outs, ins = codes.shape
        inputs = -(-ins // self.unit) * self.unit
        if outs % self.columns or inputs != ins:
            whole = np.zeros((*others, -(-outs // self.columns) * self.columns, inputs), np.uint8)
            whole[..., :outs, :ins] = codes
            codes = whole
        codes = np.ascontiguousarray(codes)
        if self.bits == 8:
            return {CODES: self._words(codes)}
        halves = codes.reshape(*codes.shape[:-1], -1, 2, 4)
        low, high = halves[..., 0, :] & 15, halves[..., 1, :] & 15
        found = {CODES: self._words((low | high << 4).reshape(*codes.shape[:-1], -1))}
        if self.bits > 4:
            extra, count = self.bits - 4, self.unit // 4
            parts = (codes >> 4).reshape(*codes.shape[:-1], -1, count, 4)
            moves = (np.arange(count, dtype=np.uint8) * extra)[:, None]
            bits = np.bitwise_or.reduce(parts << moves, axis=-2)
            found[HIGH] = self._words(bits.reshape(*codes.shape[:-1], -1))
        return found

    def _words(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows of bytes [.., panels * columns, 4 n] as [.., panels, n, columns, 4], or of FP8 by two bytes."""
        words = np.ascontiguousarray(rows).view(np.uint16 if self.is_float8 else np.uint32)
        panels = words.reshape(*words.shape[:-2], -1, self.columns, words.shape[-1]).swapaxes(-1, -2)
        return np.ascontiguousarray(panels)[..., None].view(np.uint8)

    def packed_groups(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers of groups [.., out, groups] as [.., panels, groups, columns], in a new array."""
        *others, outs, groups = values.shape
        panels = -(-outs // self.columns)
        whole = np.zeros((*others, panels * self.columns, groups), values.dtype)
        whole[..., :outs, :] = values
        return np.ascontiguousarray(whole.reshape(*others, panels, self.columns, groups).swapaxes(-1, -2))
