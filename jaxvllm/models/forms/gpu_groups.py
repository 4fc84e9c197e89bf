"""The form of matrices in few bits for our own kernel on NVIDIA GPUs, which decodes them in registers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, as_dtype, at_least, largest_of_rows, of_groups, packed, quotient
from jaxvllm.models.forms.filled_up import spread_fill, with_zeros
from jaxvllm.models.forms.form import Arrays, Experts
from jaxvllm.models.forms.scaled_groups import CODES, SCALES, ZEROS, ScaledGroups, held_dtype
from jaxvllm.models.forms.scaled_rows import rounded_by_row
from jaxvllm.models.tiling import Fill
from pallas_kernels.chips import GpuChip
from pallas_kernels.quantized_matmul.code import E4M3, Code
from sharding.rules import MODEL, partition_spec

ROW_SCALES, INPUT_SCALES = "row_scales", "input_scales"


def takes_group(code: Code, group: int, scale_dtype: str) -> bool:
    """Tells whether the kernel takes groups of so many inputs."""
    from pallas_kernels.quantized_matmul import gpu_tiles

    return gpu_tiles.takes_group(code, group, scale_dtype)


def takes_tokens(code: Code, group: int | None) -> bool:
    """Tells whether the kernel takes tokens that are rounded to the code, with a size for each group of inputs."""
    from pallas_kernels.quantized_matmul import gpu_tiles

    return gpu_tiles.takes_tokens(code, group)


@dataclass(frozen=True)
class _FilledSizes:
    """The rows and inputs of a matrix on each device, with the zeros that fill it up, and how many devices share them.

    group: how many inputs have one scale; None: all
    """

    parts_out: int
    parts_in: int
    rows: int
    inputs: int
    group: int | None


@dataclass(frozen=True)
class GpuGroups(ScaledGroups):
    """The arrays of `ScaledGroups`, and for scales in E4M3 one more scale for each row. A group may be a whole row.

    Zeros follow the inputs and the rows of each device's codes, up to the sizes that the kernel takes, and the groups
    of its scales. Where no row is divided among devices, the last group may have fewer inputs than the others.

    rounds_tokens: whether tokens are rounded to the code of the rows, too: the largest number of each of their groups
        becomes the largest code
    has_input_scale: whether tokens are divided by a scale that is stored, and rounded to the code of the rows. A matrix
        that is made of several tensors has the largest of their scales
    """

    rounds_tokens: bool = field(default=False, kw_only=True)
    has_input_scale: bool = field(default=False, kw_only=True)
    chip: GpuChip = field(kw_only=True)
    interpret: bool = field(default=False, kw_only=True)

    reads_stacks: ClassVar[bool] = True

    @property
    def tells_columns(self) -> bool:
        return not self.has_input_scale

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a scale of its own, by which those of its groups are multiplied."""
        return self.scale_dtype == E4M3.name

    def takes(self, matrix: ParamDecl) -> bool:
        group = self._sizes_of(matrix).group
        return group is None or takes_group(self.code, group, self.scale_dtype)

    def _sizes_of(self, matrix: ParamDecl) -> _FilledSizes:
        *_, parts_out, parts_in = map(self._parts, matrix.axes)
        return self._sizes(matrix.shape, parts_out, parts_in)

    def _sizes(self, shape: tuple[int, ...], parts_out: int, parts_in: int) -> _FilledSizes:
        from pallas_kernels.quantized_matmul import gpu_tiles

        rows, inputs = shape[-2] // parts_out, shape[-1] // parts_in
        group = None if self.group is None else self._group(inputs)
        is_whole = takes_tokens if self.rounds_tokens else partial(takes_group, scale_dtype=self.scale_dtype)
        if self.group and group and parts_in == 1 and not is_whole(self.code, group):
            group = self.group
        return _FilledSizes(
            parts_out,
            parts_in,
            gpu_tiles.filled_rows(rows, is_alone=len(shape) == 2),
            gpu_tiles.filled_inputs(self.code, inputs, group),
            group,
        )

    def _parts(self, axis: str | None) -> int:
        """Returns how many devices share an axis out."""
        return self.shards if MODEL in partition_spec((axis,)) else 1

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        sizes, (*lead, out, size) = self._sizes_of(matrix), matrix.shape
        inputs, per_byte = sizes.parts_in * sizes.inputs, self.code.per_byte
        if sizes.group and sizes.group % per_byte:
            raise ValueError(
                "numbers of four bits lie in pairs, so each device must have an even number of the inputs of a matrix, "
                f"not {size // sizes.parts_in}: use int8 or fp8, or a smaller mesh"
            )
        codes = replace(
            matrix,
            shape=(*lead, sizes.parts_out * sizes.rows, inputs // per_byte),
            dtype=held_dtype(self.code.dtype),
            per_element=per_byte,
            heads=None,
        )
        options: dict[str, Any] = {"chosen": matrix.chosen}
        groups = inputs // (sizes.group or sizes.inputs)
        scales = ParamDecl((*lead, out, groups), matrix.axes, "ones", dtype=held_dtype(self.scale_dtype), **options)
        found = {CODES: codes, SCALES: scales} | self._zeros(scales)
        if self.has_row_scales:
            found[ROW_SCALES] = replace(scales, shape=(*lead, out, 1), axes=(*matrix.axes[:-1], None), dtype="float32")
        if self.has_input_scale:
            axes = (*matrix.axes[:-2], None, None)
            found[INPUT_SCALES] = replace(scales, shape=(*lead, 1, 1), axes=axes, dtype="float32")
        return found

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        if self.has_input_scale:
            raise ValueError(
                "a matrix whose tokens have a scale that is stored cannot be made of one in 16 bits, which has none: "
                "load weights that are stored like the first ones, or start again"
            )
        count = shardings[CODES].num_devices
        *_, parts_out, parts_in = (count // part for part in shardings[CODES].shard_shape((count,) * matrix.ndim))
        # jax knows a function again that lives as long as its module: a model has thousands of experts.
        rounded = jax.jit(_rounded, static_argnums=(0, 2, 3), out_shardings=dict(shardings))
        kept: dict[str, jax.Array] = rounded(self, matrix, parts_out, parts_in)
        return kept

    def filled_up(self, matrix: jax.Array, parts_out: int, parts_in: int) -> dict[str, jax.Array]:
        """Returns the arrays of a matrix that is rounded, of which so many devices share the rows, and the inputs."""
        sizes = self._sizes(matrix.shape, parts_out, parts_in)
        wide = with_zeros(matrix, -1, sizes.parts_in, sizes.inputs)
        found = self.rounded(wide, sizes.group or sizes.inputs)
        return found | {CODES: with_zeros(found[CODES], -2, sizes.parts_out, sizes.rows)}

    def rounded(self, matrix: jax.Array, group: int) -> dict[str, jax.Array]:
        if not self.has_row_scales:
            return super().rounded(matrix, group)
        by_group = matrix.astype(jnp.float32).reshape(*matrix.shape[:-1], -1, group)
        wanted = jnp.max(jnp.abs(by_group), axis=-1) * np.float32(1 / self.code.largest)
        largest = jnp.max(wanted, axis=-1, keepdims=True)
        of_rows = jnp.where(largest > 0, largest * np.float32(1 / E4M3.largest), 1.0)
        scales = E4M3.rounded(wanted / of_rows)
        whole = (scales.astype(jnp.float32) * of_rows)[..., None]
        codes = self.code.rounded(jnp.where(whole > 0, by_group / whole, 0.0))
        held = jax.lax.bitcast_convert_type(scales, held_dtype(self.scale_dtype))
        return {CODES: codes.reshape(*matrix.shape[:-1], -1), SCALES: held, ROW_SCALES: of_rows}

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        sizes, (*lead, out, size) = self._sizes_of(matrix), matrix.shape
        group, parts_in = sizes.group or sizes.inputs, sizes.parts_in

        def spread(fill: Fill, parts_out: int, rows: int) -> Fill:
            sides = out // parts_out, size // parts_in
            return spread_fill(fill, tuple(lead), sides, (rows, sizes.inputs), (parts_out, parts_in))

        codes = spread(elements.codes, sizes.parts_out, sizes.rows)
        scales = quotient(elements.scales, elements.tensor_scales) if self.has_row_scales else elements.scales
        scales = spread(scales, 1, out)
        if self.scale_dtype == "float8_e8m0fnu":  # it has no zero, which would become NaN
            scales = at_least(scales, 2.0**-127)
        found = {
            CODES: as_dtype(packed(codes, self.code.per_byte), self.code.dtype),
            SCALES: as_dtype(of_groups(scales, group), self.scale_dtype),
        }
        if self.has_zeros:
            found[ZEROS] = of_groups(spread(elements.zeros, 1, out), group)
        if self.has_input_scale:
            found[INPUT_SCALES] = largest_of_rows(elements.input_scales, out)
        return found | ({ROW_SCALES: elements.tensor_scales} if self.has_row_scales else {})

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_in_stack(x, {name: array[None] for name, array in arrays.items()}, 0, dtype)

    def product_in_stack(
        self, x: jax.Array, stack: Arrays, number: jax.Array | int, dtype: DTypeLike | None = None
    ) -> jax.Array:
        x = self._filled(x, stack)
        y = self._product(x, [stack], 0, number, None, dtype)
        return super().product_in_stack(x, _without_filling(stack), number, dtype) if y is None else y

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        wide = self._filled(x, experts.stacks[0])
        y = self._product(wide, experts.stacks, experts.index, experts.first, starts, dtype)
        return super().grouped_product(x, experts, starts, dtype) if y is None else y

    def _filled(self, x: jax.Array, stack: Arrays) -> jax.Array:
        """Returns x with zeros for the inputs that the codes have beyond those of the matrix."""
        return with_zeros(x, -1, 1, stack[CODES].shape[-1] * self.code.per_byte)

    def _product(
        self,
        x: jax.Array,
        stacks: Sequence[Arrays],
        index: jax.Array | int,
        first: jax.Array | int,
        starts: jax.Array | None,
        dtype: DTypeLike | None,
    ) -> jax.Array | None:
        """Multiplies each group of rows of x by a matrix of stack `index`, or returns None where no kernel does.

        Without `starts` all rows are of one group.
        """
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.quantized_matmul import gpu, gpu_tiles

        dtype = x.dtype if dtype is None else jnp.dtype(dtype)
        *panels, rows = stacks[0][CODES].shape[1:-1]
        *out, groups = stacks[0][SCALES].shape[1:]
        inputs, sizes = x.shape[1], None
        group = inputs // groups
        if self.has_input_scale:
            scale = jnp.stack([stack[INPUT_SCALES][first].max() for stack in stacks])[index]
            within = jnp.clip(x.astype(jnp.float32) / scale, -self.code.largest, self.code.largest)
            x, sizes = self.code.rounded(within), jnp.full((1, len(x)), scale)
        elif self.rounds_tokens and takes_tokens(self.code, self.group and group):
            by_group, of_groups = rounded_by_row(x.reshape(len(x), groups, group), self.code)
            x, sizes = by_group.reshape(x.shape), of_groups.T
        num_groups = 1 if starts is None else len(starts) - 1
        shape = math.prod(panels) * rows, inputs
        tiles = gpu_tiles.choose_tiles(x, shape, self.code, group, self.scale_dtype, num_groups, self.chip)
        if tiles is None:
            return None
        multiply = partial(
            gpu.quantized_matmul,
            code=self.code,
            scale_dtype=self.scale_dtype,
            dtype=dtype,
            tiles=tiles,
            chip=self.chip,
            interpret=self.interpret,
            panels=math.prod(panels),
        )

        def of_stack(stack: Arrays) -> jax.Array:
            flat = {name: array.reshape(len(array), -1, array.shape[-1]) for name, array in stack.items()}
            is_by_row = self.group is None and sizes is not None
            of_rows = flat[SCALES] if is_by_row else flat.get(ROW_SCALES)
            return multiply(x, flat[CODES], flat[SCALES], flat.get(ZEROS), starts, first, of_rows, sizes)

        branches = [partial(of_stack, stack) for stack in stacks]
        # Layers have arrays of their own on a CPU alone, where the kernel is interpreted.
        y = jax.lax.switch(index, branches) if len(branches) > 1 else branches[0]()
        result: jax.Array = y.reshape(len(x), *out)
        return result

    def _decoded(self, rows: Arrays, dtype: DTypeLike) -> jax.Array:
        if not self.has_row_scales:
            return super()._decoded(rows, dtype)
        return (super()._decoded(rows, jnp.float32) * rows[ROW_SCALES]).astype(dtype)


def _rounded(form: GpuGroups, matrix: jax.Array, parts_out: int, parts_in: int) -> dict[str, jax.Array]:
    return form.filled_up(matrix, parts_out, parts_in)


def _without_filling(stack: Arrays) -> Arrays:
    """Returns arrays whose codes have the rows of the matrix alone. XLA may have to copy them."""
    rows = stack[SCALES].shape[-2]
    of_rows = {name: array for name, array in stack.items() if name != INPUT_SCALES}
    return of_rows if stack[CODES].shape[-2] == rows else {**of_rows, CODES: stack[CODES][..., :rows, :]}
