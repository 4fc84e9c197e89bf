"""The form for our own integer kernel on CPUs: panels of the codes that a checkpoint stores, and of their scales."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, FewBits, StoredAs, as_dtype, at_least, of_groups, of_rows
from jaxvllm.models.forms.form import Arrays, Experts, Gating
from jaxvllm.models.forms.nested_groups import NestedGroups
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.large_pages import kept_zeros
from jaxvllm.models.tiling import Box, Fill
from pallas_kernels.chips import CpuChip
from pallas_kernels.integer_matmul import (
    CodePanels,
    integer_matmul,
)
from pallas_kernels.integer_matmul.code_panels import (
    CODES,
    FACTORS,
    HIGH,
    MIN_FACTORS,
    MINS,
    SCALE_BYTES,
    SCALES,
    UNITS,
    ZEROS,
)
from pallas_kernels.integer_matmul.decoded_rows import decoded_rows
from pallas_kernels.quantized_matmul.code import E4M3, INT8, UINT8

# So many codes are put in order together.
_MOST = 1 << 20
# Makes panels of whole panels of rows.
type _Packed = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class CpuGroups(FewBits):
    """A matrix [.., out, in] is codes and scales as `CodePanels` says, which `pallas_kernels.integer_matmul` reads.

    The dimensions before `out` stay. Tokens are rounded to eight bits before they are multiplied.

    stored: what codes, scales and zeros mean, but for the size of groups
    group: how many inputs have one scale, at most; None: all of a row
    outs: the dimensions of the matrix but for its inputs, which only the form of that matrix knows
    """

    stored: StoredAs
    group: int | None
    chip: CpuChip
    outs: tuple[int, ...] = ()

    multiply: ClassVar[Callable[..., jax.Array]] = staticmethod(integer_matmul)  # the kernel

    @staticmethod
    def takes_stored(stored: StoredAs, group: int | None) -> bool:
        """Tells whether the kernel knows the code and the scales, and groups of at most that size."""
        known = stored.code in (INT8, UINT8) or (stored.code.bits < 8 and not stored.code.is_by_table)
        if not known or stored.scale_dtype not in SCALE_BYTES:
            return False
        return group is None or group % UNITS[stored.code.bits] == 0

    def of_matrix(self, matrix: ParamDecl) -> FewBits:
        group = None if self.group is None else math.gcd(self.group, matrix.shape[-1])
        if len(matrix.shape) > 1 and self.takes_stored(self.stored, group):
            return replace(self, outs=matrix.shape[:-1])
        if self.stored.is_nested:
            nested = NestedGroups.of(self.stored, group)
            assert nested is not None, "the kernel takes no groups that XLA does not"
            return nested
        return ScaledGroups(self.stored.code, self.group, self.stored.scale_dtype, self.stored.has_zeros)

    def of_table(self, table: ParamDecl, dtype: DTypeLike) -> "CodeTable | None":
        return CodeTable(self, jnp.dtype(dtype).name, table.shape[1]) if len(table.shape) == 2 else None

    def panels(self, inputs: int) -> CodePanels:
        """Returns how matrices with so many inputs lie."""
        code, stored = self.stored.code, self.stored
        return CodePanels(
            columns=self.chip.panel_columns,
            bits=code.bits,
            group=None if self.group is None else math.gcd(self.group, inputs),
            scale_dtype=stored.scale_dtype,
            zero=0 if stored.has_zeros or stored.has_mins else code.zero + self._added,
            offsets="zeros" if stored.has_zeros else "mins" if stored.has_mins else "none",
            span=None if stored.span is None else math.gcd(stored.span, inputs),
            looked_up=None if code.values is None else code,
            is_float8=code == E4M3,
            by_row=stored.is_by_row and stored.rounds_tokens and code == INT8,
        )

    @property
    def _added(self) -> int:
        """The number that is added to codes, so that none is negative."""
        return 128 if self.stored.code == INT8 else 0

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        *others, outs, inputs = matrix.shape
        *of_others, of_out, of_in = matrix.axes
        found = {}
        for name, (shape, dtype) in self.panels(inputs).arrays(outs, inputs).items():
            axes = (*of_others, of_out, of_in, *(None for _ in shape[2:]))
            init: Literal["ones", "zeros"] = "zeros" if name == ZEROS else "ones"
            found[name] = ParamDecl((*others, *shape), axes, init, dtype=dtype, chosen=matrix.chosen)
        per_byte = 1 if self.stored.code.bits == 8 else 2
        codes = replace(found[CODES], init=matrix.init, storage=matrix.storage, per_element=per_byte)
        return found | {CODES: codes}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        inputs = matrix.shape[-1]
        panels, code = self.panels(inputs), self.stored.code
        # jax knows a function again that lives as long as its module: a model has thousands of experts.
        if (nested := self._nested(inputs)) is not None:
            parts = {name: np.asarray(part) for name, part in _nearest(nested, matrix, inputs).items()}
        else:
            groups = ScaledGroups(code, self.group, self.stored.scale_dtype, self.stored.has_zeros)
            parts = {name: np.asarray(part) for name, part in _by_group(groups, matrix, panels.group or inputs).items()}
            if code.per_byte == 2:
                both = parts[CODES]
                parts[CODES] = np.stack([both & 15, both >> 4], axis=-1).reshape(matrix.shape)
        made = panels.packed_codes(self._unsigned(parts[CODES]))
        if ZEROS in parts:
            parts[ZEROS] = self._unsigned(parts[ZEROS])
        if MINS in parts:
            parts[MINS] = parts[MINS].view(panels.held_mins)
        made |= {name: panels.packed_groups(part) for name, part in parts.items() if name != CODES}
        return {name: jax.device_put(_kept(array), shardings[name]) for name, array in made.items()}

    def _unsigned(self, codes: np.ndarray) -> np.ndarray:
        unsigned = codes.view(np.uint8)
        return unsigned ^ np.uint8(self._added) if self._added else unsigned

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        *_, outs, inputs = matrix.shape
        panels, stored = self.panels(inputs), self.stored
        group = panels.group
        codes = as_dtype(elements.codes, stored.code.dtype)
        stored_mins = "uint8" if stored.span is not None else stored.scale_dtype
        scales = at_least(elements.scales, 2.0**-127) if stored.scale_dtype == "float8_e8m0fnu" else elements.scales

        def of_each(values: Fill) -> Fill:
            """Returns the function that fills with the values of groups."""
            return of_groups(values, group) if group is not None else _added_axis(of_rows(values))

        def packed_codes(rows: np.ndarray) -> np.ndarray:
            return panels.packed_codes(self._unsigned(rows))[CODES]

        def packed_high(rows: np.ndarray) -> np.ndarray:
            return panels.packed_codes(rows)[HIGH]

        def packed_zeros(rows: np.ndarray) -> np.ndarray:
            return panels.packed_groups((rows + self._added).astype(np.uint8))

        def in_groups(
            values: Fill, dtype: str, size: int | None = group, packed: _Packed = panels.packed_groups
        ) -> Fill:
            shape = (outs, 1 if size is None else inputs // size)
            return _in_panels(values, dtype, shape, panels.columns, 1, packed)

        def in_words(words: Fill | None, unit: int, packed: _Packed) -> Fill:
            """Returns the function that fills with words of so many codes, which are there or are packed."""
            if words is None:
                return _in_panels(codes, np.uint8, (outs, inputs), panels.columns, unit, packed)
            return _words_in_panels(words, (outs, inputs // unit), panels)

        found = {
            CODES: in_words(elements.words, min(panels.unit, UNITS[4]), packed_codes),
            SCALES: in_groups(as_dtype(of_each(scales), stored.scale_dtype), panels.held_scales),
        }
        if panels.bits in (5, 6):
            found[HIGH] = in_words(elements.high_words, panels.unit, packed_high)
        if stored.has_zeros:
            found[ZEROS] = in_groups(of_each(elements.zeros), "int16", packed=packed_zeros)
        if stored.has_mins:
            found[MINS] = in_groups(as_dtype(of_each(elements.mins), stored_mins), panels.held_mins)
        if panels.span is not None:
            factors = {FACTORS: elements.factors} | ({MIN_FACTORS: elements.min_factors} if stored.has_mins else {})
            for name, values in factors.items():
                found[name] = in_groups(of_groups(values, panels.span), "float16", panels.span)
        return found

    def _nested(self, inputs: int) -> NestedGroups | None:
        """Returns the form that rounds to what is stored, of matrices with so many inputs, if it is nested."""
        return NestedGroups.of(self.stored, self.panels(inputs).group) if self.stored.is_nested else None

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_with_one(x, [arrays], 0, dtype)

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        y = self._multiplied(x, matrices, index, dtype=dtype)
        return y.reshape(len(x), *self.outs)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return self._multiplied(x, matrices, index, gate=gating)

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        y = self._multiplied(x, _stacks(experts), experts.index, starts=starts, dtype=dtype)
        return y.reshape(len(x), *self.outs[1:])

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return self._multiplied(x, _stacks(experts), experts.index, starts=starts, gate=gating)

    def _multiplied(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, **options: Any
    ) -> jax.Array:
        panels, outs = self.panels(x.shape[1]), self.outs[-1]
        return type(self).multiply(x, matrices, index, panels=panels, outs=outs, chip=self.chip, **options)


@dataclass(frozen=True)
class CodeTable(FewBits):
    """A table [V, in] in the arrays of `CpuGroups`: rows are decoded when they are looked up. It may be the LM head.

    dtype: of rows that are looked up, which is that of the layers
    inputs: the numbers of a row, which only the form of that table knows
    """

    groups: CpuGroups
    dtype: str
    inputs: int = 0

    def takes(self, matrix: ParamDecl) -> bool:
        return isinstance(self.groups.of_matrix(matrix), CpuGroups)

    def of_matrix(self, matrix: ParamDecl) -> FewBits:
        groups = self.groups.of_matrix(matrix)
        assert isinstance(groups, CpuGroups), "the form was chosen for this table"
        return replace(self, groups=groups, inputs=matrix.shape[-1])

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        return self.groups.declare(matrix)

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        return self.groups.fills(matrix, elements)

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return self.groups.keep(matrix, shardings)

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.groups.product(x, arrays, dtype, is_slice)

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        [num_rows] = self.groups.outs
        rows = jnp.clip(numbers, 0, num_rows - 1)
        return decoded_rows(self.groups.panels(self.inputs), arrays, rows, self.inputs).astype(self.dtype)

    def row_dtype(self, arrays: Arrays) -> DTypeLike:
        return self.dtype


def _kept(array: np.ndarray) -> np.ndarray:
    """Returns a copy in memory that XLA uses in place."""
    copy = kept_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


def _stacks(experts: Experts) -> Sequence[Arrays]:
    """Returns the arrays of the experts of all layers, each of which has arrays of its own on a CPU."""
    assert isinstance(experts.first, int) and not experts.first, "on a CPU each layer has arrays of its own"
    return experts.stacks


def _added_axis(values: Fill) -> Fill:
    """Returns the function that fills [.., 1] with what `values` fills [..] with."""
    return lambda out, start: values(out[..., 0], start[:-1])


def _in_panels(rows: Fill, dtype: DTypeLike, shape: tuple[int, int], columns: int, unit: int, packed: _Packed) -> Fill:
    """Returns the function that fills panels with what `packed` makes of whole panels of rows, which `rows` fills.

    shape: of a matrix of these rows
    unit: how many elements of a row lie in one element of a panel's first dimension
    """
    num_rows, size = shape

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        for box in Box(start, out.shape).pieces(_MOST):
            others = slice(0, len(shape_of_others := box.shape[: -_dimensions(unit)]))
            panel, first, *inner = box.start[others.stop :]
            num_panels, count, *sizes = box.shape[others.stop :]
            top, left = panel * columns, first * unit
            wanted = min(num_panels * columns, num_rows - top), min(count * unit, size - left)
            part = np.zeros((*shape_of_others, *wanted), dtype)
            rows(part, (*box.start[others], top, left))
            # What comes after the last input may be filled up for arrays of more inputs than this one.
            all_others = *(slice(None),) * (others.stop + 1), slice(count)
            index = tuple(slice(begin, begin + length) for begin, length in zip(inner, sizes, strict=True))
            out[box.index(start)] = packed(part)[all_others + index]

    return fill


def _words_in_panels(words: Fill, shape: tuple[int, int], panels: CodePanels) -> Fill:
    """Returns the function that fills panels with words u32 of several codes, with which `words` fills rows."""
    in_order = _in_panels(words, np.uint32, shape, panels.columns, 1, panels.packed_groups)

    def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
        if out.flags.c_contiguous:
            in_order(out.view(np.uint32)[..., 0], start[:-1])
        else:
            whole = np.zeros(out.shape, np.uint8)
            fill(whole, start)
            out[...] = whole

    return fill


def _dimensions(unit: int) -> int:
    """Returns how many dimensions a panel's array has after those of other matrices. Codes have one of bytes."""
    return 3 if unit == 1 else 4


def _by_group(form: ScaledGroups, matrix: jax.Array, group: int) -> dict[str, jax.Array]:
    return jax.jit(ScaledGroups.rounded, static_argnums=(0, 2))(form, matrix, group)


def _nearest(form: NestedGroups, matrix: jax.Array, inputs: int) -> dict[str, jax.Array]:
    return jax.jit(NestedGroups.nearest, static_argnums=(0, 2))(form, matrix, inputs)
