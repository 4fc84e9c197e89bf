"""The form for our own integer kernel on CPUs: panels of the codes that a checkpoint stores, and of their scales."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, FewBits, StoredAs, as_dtype, at_least, of_groups, of_rows
from jaxvllm.models.forms.form import Arrays, Experts, Gating
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.scaled_rows import rounded_by_row
from jaxvllm.models.tiling import Box, Fill
from pallas_kernels.chips import CpuChip
from pallas_kernels.integer_matmul import (
    CodePanels,
    integer_gated_matmul,
    integer_grouped_gated_matmul,
    integer_grouped_matmul,
    integer_matmul,
)
from pallas_kernels.integer_matmul.code_panels import CODES, SCALE_BYTES, SCALES, ZEROS
from pallas_kernels.quantized_matmul.code import FLOAT4, INT8, Code

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

    @staticmethod
    def takes_stored(stored: StoredAs, group: int | None) -> bool:
        """Tells whether the kernel knows the code and the scales, and groups of at most that size."""
        known = stored.code == INT8 or stored.code.per_byte == 2
        return (
            known and stored.scale_dtype in SCALE_BYTES and (group is None or group % (4 * stored.code.per_byte) == 0)
        )

    def of_matrix(self, matrix: ParamDecl) -> FewBits:
        group = None if self.group is None else math.gcd(self.group, matrix.shape[-1])
        if len(matrix.shape) > 1 and self.takes_stored(self.stored, group):
            return replace(self, outs=matrix.shape[:-1])
        return ScaledGroups(self.stored.code, self.group, self.stored.scale_dtype, self.stored.has_zeros)

    def panels(self, inputs: int) -> CodePanels:
        """Returns how matrices with so many inputs lie."""
        code = self.stored.code
        return CodePanels(
            columns=self.chip.panel_columns,
            bits=8 // code.per_byte,
            group=None if self.group is None else math.gcd(self.group, inputs),
            scale_dtype=self.stored.scale_dtype,
            zero=0 if self.stored.has_zeros else code.zero + self._added,
            offsets="zeros" if self.stored.has_zeros else "none",
            is_float4=code == FLOAT4,
            by_row=self.stored.rounds_tokens,
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
        codes = replace(found[CODES], init=matrix.init, storage=matrix.storage, per_element=self.stored.code.per_byte)
        return found | {CODES: codes}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        inputs = matrix.shape[-1]
        panels, code = self.panels(inputs), self.stored.code
        # jax knows a function again that lives as long as its module: a model has thousands of experts.
        if self.stored.is_by_row:
            codes, scales = (np.asarray(part) for part in _by_row(matrix, code))
            parts = {CODES: codes, SCALES: scales[..., None]}
        else:
            groups = ScaledGroups(code, self.group, self.stored.scale_dtype, self.stored.has_zeros)
            parts = {name: np.asarray(part) for name, part in _by_group(groups, matrix, panels.group or inputs).items()}
            if code.per_byte == 2:
                both = parts[CODES]
                parts[CODES] = np.stack([both & 15, both >> 4], axis=-1).reshape(matrix.shape)
        made = panels.packed_codes(self._unsigned(parts[CODES]))
        made[SCALES] = panels.packed_groups(parts[SCALES])
        if ZEROS in parts:
            made[ZEROS] = panels.packed_groups(self._unsigned(parts[ZEROS]))
        return {name: jax.device_put(array, shardings[name]) for name, array in made.items()}

    def _unsigned(self, codes: np.ndarray) -> np.ndarray:
        unsigned = codes.view(np.uint8)
        return unsigned ^ np.uint8(self._added) if self._added else unsigned

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        *_, outs, inputs = matrix.shape
        panels, stored = self.panels(inputs), self.stored
        group = panels.group
        codes = as_dtype(elements.codes, stored.code.dtype)
        scales = at_least(elements.scales, 2.0**-127) if stored.scale_dtype == "float8_e8m0fnu" else elements.scales

        def of_each(values: Fill) -> Fill:
            """Returns the function that fills with the values of groups."""
            return of_groups(values, group) if group is not None else _added_axis(of_rows(values))

        def packed_codes(rows: np.ndarray) -> np.ndarray:
            return panels.packed_codes(self._unsigned(rows))[CODES]

        def packed_zeros(rows: np.ndarray) -> np.ndarray:
            return panels.packed_groups((rows + self._added).astype(np.uint8))

        groups = 1 if group is None else inputs // group
        found = {
            CODES: _in_panels(codes, np.uint8, (outs, inputs), panels.columns, panels.unit, packed_codes),
            SCALES: _in_panels(
                as_dtype(of_each(scales), stored.scale_dtype),
                panels.held_scales,
                (outs, groups),
                panels.columns,
                1,
                panels.packed_groups,
            ),
        }
        if stored.has_zeros:
            zeros = of_each(elements.zeros)
            found[ZEROS] = _in_panels(zeros, np.int16, (outs, groups), panels.columns, 1, packed_zeros)
        return found

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_with_one(x, [arrays], 0, dtype)

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        y = integer_matmul(x, matrices, index, dtype=dtype, **self._options(x))
        return y.reshape(len(x), *self.outs)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return integer_gated_matmul(x, matrices, index, gate=gating, **self._options(x))

    def grouped_product(self, x: jax.Array, experts: Experts, starts: jax.Array) -> jax.Array:
        y = integer_grouped_matmul(x, _stacks(experts), experts.index, starts, **self._options(x))
        return y.reshape(len(x), *self.outs[1:])

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return integer_grouped_gated_matmul(x, _stacks(experts), experts.index, starts, gate=gating, **self._options(x))

    def _options(self, x: jax.Array) -> dict[str, Any]:
        return {"panels": self.panels(x.shape[1]), "outs": self.outs[-1], "chip": self.chip}


def _stacks(experts: Experts) -> Sequence[Arrays]:
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
            all_others = (slice(None),) * (others.stop + 2)
            index = tuple(slice(begin, begin + length) for begin, length in zip(inner, sizes, strict=True))
            out[box.index(start)] = packed(part)[all_others + index]

    return fill


def _dimensions(unit: int) -> int:
    """Returns how many dimensions a panel's array has after those of other matrices. Codes have one of bytes."""
    return 3 if unit == 1 else 4


def _by_row(matrix: jax.Array, code: Code) -> tuple[jax.Array, jax.Array]:
    return jax.jit(rounded_by_row, static_argnums=1)(matrix, code)


def _by_group(form: ScaledGroups, matrix: jax.Array, group: int) -> dict[str, jax.Array]:
    return jax.jit(ScaledGroups.rounded, static_argnums=(0, 2))(form, matrix, group)
