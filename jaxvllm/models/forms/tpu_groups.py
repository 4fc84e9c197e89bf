"""Groups with a scale for our own kernel on TPUs: words of codes that lie as its registers take them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, FewBits, as_dtype, at_least, in_words, of_groups, swapped
from jaxvllm.models.forms.filled_up import rounded_up, spread_fill, with_zeros
from jaxvllm.models.forms.form import Arrays, Experts
from jaxvllm.models.forms.scaled_groups import CODES, SCALES, ZEROS, ScaledGroups
from jaxvllm.models.tiling import Fill
from pallas_kernels.chips import TpuChip
from sharding.rules import MODEL, partition_spec

if TYPE_CHECKING:
    from pallas_kernels.quantized_matmul.tpu import QuantizedMatrices

INPUTS, COLUMNS = 128, 128  # of which a device has a multiple: zeros follow those of the matrix
LEAST_GROUP = 16
# The rows of a tile of HBM. Of gpt-oss's scales, with 92 groups, XLA would have made the experts the rows, and copied
# 0.6 GiB in each step.
TILE_ROWS = {"uint8": 32, "int8": 32, "bfloat16": 16, "float32": 8}


def takes_groups(group: int | None) -> bool:
    """Tells whether the kernel takes groups of at most that size. None stands for all that a device has of a row."""
    return group is None or math.gcd(group, INPUTS) % LEAST_GROUP == 0


@dataclass(frozen=True)
class TpuGroups(FewBits):
    """A matrix [.., out, in] of `groups` is words of its codes [.., in / codes of a word, out], scales and zeros.

    Scales and zeros are [.., in / group, out], where a group has 128 inputs at most. The kernel reads all of them where
    they are in a stack. Each device's codes have zeros after its inputs and its columns, up to a multiple of 128, and
    its scales have some after its groups, so that XLA keeps all of these arrays as the kernel reads them.

    groups: what the arrays mean, but for their layout
    """

    groups: ScaledGroups
    chip: TpuChip
    interpret: bool = False
    reads_stacks: ClassVar[bool] = True

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        *lead, out, size = matrix.shape
        *of_lead, of_out, of_in = matrix.axes
        parts_out, parts_in = self._parts(of_out), self._parts(of_in)
        inputs = parts_in * rounded_up(size // parts_in, INPUTS)
        rows = rounded_up(inputs // parts_in // self.group_of(size // parts_in), self._unit)
        columns = parts_out * rounded_up(out // parts_out, COLUMNS)
        per_word = 4 * self.groups.code.per_byte
        axes = (*of_lead, of_in, of_out)
        codes = replace(
            matrix,
            shape=(*lead, inputs // per_word, columns),
            axes=axes,
            dtype="int32",
            per_element=per_word,
            heads=None,
        )
        scales = ParamDecl((*lead, parts_in * rows, out), axes, "ones", dtype=self._scale_dtype, chosen=matrix.chosen)
        found = {CODES: codes, SCALES: scales}
        return found | (
            {ZEROS: replace(scales, init="zeros", dtype=self.groups.code.dtype)} if self.groups.has_zeros else {}
        )

    def _parts(self, axis: str | None) -> int:
        """Returns how many devices share an axis out."""
        return self.groups.shards if MODEL in partition_spec((axis,)) else 1

    def group_of(self, inputs: int) -> int:
        """Returns how many of the inputs that a device has share a scale. A row's only scale is repeated."""
        if self.groups.group is None:
            return INPUTS
        group = math.gcd(INPUTS, self.groups.group, inputs)
        if group % LEAST_GROUP:
            raise ValueError(
                f"scales by group need matrices whose inputs on each device are a multiple of {LEAST_GROUP} on a TPU, "
                f"and one has {inputs}: use another quantization, or a smaller mesh"
            )
        return group

    @property
    def _unit(self) -> int:
        """The rows of which scales and zeros have a multiple."""
        dtypes = [self._scale_dtype, *([self.groups.code.dtype] if self.groups.has_zeros else [])]
        return max(TILE_ROWS[dtype] for dtype in dtypes)

    @property
    def _scale_dtype(self) -> str:
        """The dtype of arrays of scales, all of which it holds exactly. TPUs have no float16."""
        stored = self.groups.scale_dtype
        return {"float8_e8m0fnu": "uint8", "bfloat16": "bfloat16"}.get(stored, "float32")

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        sharding = shardings[CODES]
        assert isinstance(sharding, NamedSharding)
        count = sharding.num_devices
        parts_in, parts_out = (count // part for part in sharding.shard_shape((count,) * matrix.ndim)[-2:])
        # jax knows a function again that lives as long as its module: a model has thousands of experts.
        rounded = jax.jit(_rounded, static_argnums=(0, 2, 3), out_shardings=dict(shardings))
        kept: dict[str, jax.Array] = rounded(self, matrix, parts_in, parts_out)
        return kept

    def rounded(self, matrix: jax.Array, parts_in: int, parts_out: int) -> dict[str, jax.Array]:
        """Returns the arrays of a matrix of which so many devices share the inputs, and the columns."""
        from pallas_kernels.quantized_matmul import tpu_words

        size = matrix.shape[-1]
        group = self.group_of(size // parts_in)
        found = self.groups.rounded(matrix, size // parts_in if self.groups.group is None else group)
        codes = found[CODES]
        if self.groups.code.per_byte == 2:
            codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(matrix.shape)
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        wide = with_zeros(codes, -1, parts_in, rounded_up(size // parts_in, INPUTS))
        wide = with_zeros(wide, -2, parts_out, rounded_up(matrix.shape[-2] // parts_out, COLUMNS))
        made = {CODES: tpu_words.in_words(self.groups.code, wide).swapaxes(-1, -2)}
        for name in (SCALES, ZEROS):
            if name in found:
                times = wide.shape[-1] // parts_in // INPUTS if self.groups.group is None else 1
                repeated = jnp.repeat(found[name], times, -1)
                rows = rounded_up(repeated.shape[-1] // parts_in, self._unit)
                padded = with_zeros(repeated, -1, parts_in, rows)
                made[name] = padded.swapaxes(-1, -2).astype(self._scale_dtype if name == SCALES else padded.dtype)
        return made

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        from pallas_kernels.quantized_matmul import tpu_words

        decls = self.declare(matrix)
        *lead, out, size = matrix.shape
        parts_out, parts_in = self._parts(matrix.axes[-2]), self._parts(matrix.axes[-1])
        inputs = decls[CODES].shape[-2] * decls[CODES].per_element
        columns = decls[CODES].shape[-1]
        group = self.group_of(size // parts_in)
        of_scales = decls[SCALES].shape[-2] * group

        def spread(fill: Fill, parts: int, columns: int, inputs: int) -> Fill:
            """Returns the function that fills an array in which zeros follow what each device has."""
            sides, lengths = (out // parts, size // parts_in), (columns // parts, inputs // parts_in)
            return spread_fill(fill, tuple(lead), sides, lengths, (parts, parts_in))

        scales, scale_dtype = spread(elements.scales, 1, out, of_scales), self._scale_dtype
        if self.groups.scale_dtype == "float8_e8m0fnu":  # it has no zero, which would become NaN
            scales, scale_dtype = at_least(scales, 2.0**-127), "float8_e8m0fnu"
        codes = as_dtype(spread(elements.codes, parts_out, columns, inputs), self.groups.code.dtype)
        words = partial(tpu_words.in_words, self.groups.code)
        found = {
            CODES: swapped(in_words(codes, decls[CODES].per_element, words)),
            SCALES: swapped(as_dtype(of_groups(scales, group), scale_dtype)),
        }
        zeros = of_groups(spread(elements.zeros, 1, out, of_scales), group)
        return found | ({ZEROS: swapped(zeros)} if self.groups.has_zeros else {})

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_in_stack(x, {name: array[None] for name, array in arrays.items()}, 0, dtype)

    def product_in_stack(
        self, x: jax.Array, stack: Arrays, number: jax.Array | int, dtype: DTypeLike | None = None
    ) -> jax.Array:
        return self._product(x, stack, jnp.array([0, len(x)], jnp.int32), number, dtype)

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        branches = [partial(self._product, x, stack, starts, experts.first, dtype) for stack in experts.stacks]
        # Layers have arrays of their own on a CPU alone, where the kernel is interpreted.
        result: jax.Array = jax.lax.switch(experts.index, branches) if len(branches) > 1 else branches[0]()
        return result

    def _product(
        self,
        x: jax.Array,
        stack: Arrays,
        starts: jax.Array,
        first: jax.Array | int,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """Multiplies rows in groups by matrices `first` and on of a stack."""
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.quantized_matmul import tpu

        w = self._matrices(stack, self.group_of(x.shape[1]))
        x = jnp.pad(x, ((0, 0), (0, w.size - x.shape[1])))
        blocks = tpu.choose_blocks(x, w, len(starts) - 1, self.chip)
        y = tpu.quantized_matmul(
            x, w, starts, first, dtype=dtype, blocks=blocks, chip=self.chip, interpret=self.interpret
        )
        columns = stack[SCALES].shape[-1]
        return y[..., :columns].reshape(len(x), *stack[CODES].shape[1:-2], columns)

    def _matrices(self, stack: Arrays, group: int) -> "QuantizedMatrices":
        from pallas_kernels.quantized_matmul.tpu import QuantizedMatrices

        flat = {name: array.reshape(len(array), -1, *array.shape[-2:]) for name, array in stack.items()}
        return QuantizedMatrices(self.groups.code, group, flat[CODES], flat[SCALES], flat.get(ZEROS))


def _rounded(form: TpuGroups, matrix: jax.Array, parts_in: int, parts_out: int) -> dict[str, jax.Array]:
    return form.rounded(matrix, parts_in, parts_out)
