"""The packed form, for our own kernels on one CPU: a matrix lies in the order in which the kernel reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.form import Arrays, Experts, Form, Gating
from jaxvllm.models.forms.plain import MATRIX
from jaxvllm.models.large_pages import kept_zeros
from pallas_kernels.chips import CpuChip
from pallas_kernels.packed_matmul import Panels, pack_into, packed_matmul

PANELS = "panels"
# Bytes of a matrix from which on the kernel packs it. NumPy packs 1.2 GB/s, and the kernel 5 to 20, but it takes 0.15 s
# to compile, and 10 ms more for each shape (Zen 4).
LEAST_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Packed(Form):
    """One array of panels, on one device, which is never stacked. `of_matrix` makes the form of each matrix.

    A matrix [2, F, in] has panels of each half, so that a gate and the features beside it lie at the same place.
    Otherwise all dimensions but the last are one.

    dtype: of the matrix, and before `of_matrix` of the model
    shape: of the matrix
    of_experts: whether the first dimension is that of experts, which have panels of their own
    """

    chip: CpuChip
    dtype: str
    shape: tuple[int, ...] = ()
    of_experts: bool = False

    def of_matrix(self, matrix: ParamDecl) -> Form:
        form = replace(
            self, dtype=matrix.dtype_in(self.dtype).name, shape=matrix.shape, of_experts=matrix.storage == "experts"
        )
        # The panel of a gate that has one output, say, would be mostly zeros.
        return CpuKernel(self.chip) if form._size < self.chip.panel_columns // 4 else form

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        shape = (*self._groups, *self._halves, *self._panels.shape(self._size, self.shape[-1]))
        return {PANELS: replace(matrix, shape=shape, axes=(None,) * len(shape), heads=None)}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        *parts, outs, ins = (*self._groups, *self._halves, self._size, self.shape[-1])
        rows = np.asarray(matrix).reshape(*parts, outs, ins)
        panels = kept_zeros((*parts, *self._panels.shape(outs, ins)), rows.dtype)  # XLA uses it without a copy
        if rows.nbytes < LEAST_BYTES:
            panels[...] = self._panels.packed(rows)
        else:
            pack_into(panels, rows, self.chip)
        return {PANELS: jax.device_put(panels, shardings.get(PANELS))}

    def plain(self, arrays: Arrays) -> jax.Array:
        rows = jnp.swapaxes(arrays[PANELS], -3, -2)
        *others, panels, columns, blocks, depth = rows.shape
        rows = rows.reshape(*others, panels * columns, blocks * depth)
        return rows[..., : self._size, : self.shape[-1]].reshape(self.shape)

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_with_one(x, [arrays], 0, dtype)

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        y = packed_matmul(x, _panels_of(matrices), index, size=self._size, dtype=dtype, chip=self.chip)
        return y.reshape(len(x), *self._outs)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return packed_matmul(x, _panels_of(matrices), index, size=self._size, gate=gating, chip=self.chip)

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        stacks = _panels_of(experts.stacks)
        y = packed_matmul(x, stacks, experts.index, size=self._size, starts=starts, dtype=dtype, chip=self.chip)
        return y.reshape(len(x), *self._outs)

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        stacks = _panels_of(experts.stacks)
        return packed_matmul(x, stacks, experts.index, size=self._size, starts=starts, gate=gating, chip=self.chip)

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        rows, columns = jnp.clip(numbers, 0, self._size - 1), self._panels.columns
        found = arrays[PANELS][rows // columns, :, rows % columns]
        return found.reshape(len(rows), -1)[:, : self.shape[-1]]

    def packed(self, matrix: jax.Array) -> dict[str, jax.Array]:
        """Returns the arrays of a matrix, in a traced function."""
        size, ins = self._size, matrix.shape[-1]
        panels, blocks, columns, depth = self._panels.shape(size, ins)
        rows = matrix.reshape(*self._groups, *self._halves, size, ins)
        filled = [(0, 0)] * (rows.ndim - 2) + [(0, panels * columns - size), (0, blocks * depth - ins)]
        parts = jnp.pad(rows, filled).reshape(*rows.shape[:-2], panels, columns, blocks, depth)
        return {PANELS: jnp.swapaxes(parts, -3, -2)}

    @property
    def _panels(self) -> Panels:
        return Panels.of(self.chip, self.dtype)

    @property
    def _groups(self) -> tuple[int, ...]:
        return self.shape[: int(self.of_experts)]

    @property
    def _outs(self) -> tuple[int, ...]:
        """The shape of the outputs of a row."""
        return self.shape[len(self._groups) : -1]

    @property
    def _halves(self) -> tuple[int, ...]:
        return (2,) if len(self._outs) == 2 and self._outs[0] == 2 else ()

    @property
    def _size(self) -> int:
        """The outputs that have panels together."""
        return prod(self._outs) // prod(self._halves)


@dataclass(frozen=True)
class PackedInSteps(CpuKernel):
    """One array as checkpoints store it, of which each step packs what a device has.

    Meshes of virtual CPUs have it: they prove what real devices will do, and are not for speed. So their sums have the
    order that they have on one CPU, and their tokens differ no more than parts of sums make them.
    """

    of_experts: bool = False

    def of_matrix(self, matrix: ParamDecl) -> Form:
        return replace(self, of_experts=matrix.storage == "experts")

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        form = self._form(matrices)
        if not isinstance(form, Packed):
            return super().product_with_one(x, matrices, index, dtype)
        return form.product(x, _packed(form, matrices, index), dtype)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        form = self._form(matrices)
        if not isinstance(form, Packed):
            return super().gated_product(x, matrices, index, gating)
        return form.gated_product(x, [_packed(form, matrices, index)], 0, gating)

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        form = self._form(experts.stacks)
        if not isinstance(form, Packed):
            return super().grouped_product(x, experts, starts, dtype)
        return form.grouped_product(x, Experts([_packed(form, experts.stacks, experts.index)]), starts, dtype)

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        form = self._form(experts.stacks)
        if not isinstance(form, Packed):
            return super().grouped_gated_product(x, experts, starts, gating)
        return form.grouped_gated_product(x, Experts([_packed(form, experts.stacks, experts.index)]), starts, gating)

    def _form(self, matrices: Sequence[Arrays]) -> Form:
        """Returns the form of what one device has of each of the matrices."""
        first = matrices[0][MATRIX]
        of_device = ParamDecl(first.shape, (None,) * first.ndim, storage="experts" if self.of_experts else "matrix")
        return Packed(self.chip, first.dtype.name).of_matrix(of_device)


def _packed(form: Packed, matrices: Sequence[Arrays], index: jax.Array | int) -> Arrays:
    """Returns the panels of matrix number `index`."""
    branches = [partial(form.packed, arrays[MATRIX]) for arrays in matrices]
    panels: Arrays = jax.lax.switch(index, branches) if len(branches) > 1 else branches[0]()
    return panels


def _panels_of(matrices: Sequence[Arrays]) -> list[jax.Array]:
    return [arrays[PANELS] for arrays in matrices]
