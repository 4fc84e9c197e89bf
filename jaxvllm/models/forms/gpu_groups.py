"""The form of matrices in few bits for our own kernel on NVIDIA GPUs, which decodes them in registers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxvllm.models.forms.form import Arrays, Experts
from jaxvllm.models.forms.scaled_groups import CODES, SCALES, ZEROS, ScaledGroups
from pallas_kernels.chips import GpuChip
from pallas_kernels.quantized_matmul.code import Code


@dataclass(frozen=True)
class GpuGroups(ScaledGroups):
    """The arrays of `ScaledGroups`. A group may be a whole row.

    Where the kernel does not take the sizes of a matrix, XLA decodes some rows of it at a time.
    """

    chip: GpuChip = field(kw_only=True)
    interpret: bool = field(default=False, kw_only=True)

    reads_stacks: ClassVar[bool] = True

    @staticmethod
    def takes_group(code: Code, group: int) -> bool:
        """Tells whether the kernel takes groups of so many inputs."""
        from pallas_kernels.quantized_matmul import gpu_tiles

        return gpu_tiles.takes_group(code, group)

    def takes(self, inputs: int) -> bool:
        from pallas_kernels.quantized_matmul import gpu_tiles

        return gpu_tiles.takes_inputs(self.code, inputs)

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_in_stack(x, {name: array[None] for name, array in arrays.items()}, 0, dtype)

    def product_in_stack(
        self, x: jax.Array, stack: Arrays, number: jax.Array | int, dtype: DTypeLike | None = None
    ) -> jax.Array:
        y = self._product(x, [stack], 0, number, None, dtype)
        return super().product_in_stack(x, stack, number, dtype) if y is None else y

    def grouped_product(self, x: jax.Array, experts: Experts, starts: jax.Array) -> jax.Array:
        y = self._product(x, experts.stacks, experts.index, experts.first, starts, None)
        return super().grouped_product(x, experts, starts) if y is None else y

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

        out, inputs = stacks[0][CODES].shape[1:-1], x.shape[1]
        group = inputs // stacks[0][SCALES].shape[-1]
        num_groups = 1 if starts is None else len(starts) - 1
        tiles = gpu_tiles.choose_tiles(x, (prod(out), inputs), self.code, group, num_groups, self.chip)
        if tiles is None:
            return None
        multiply = partial(
            gpu.quantized_matmul,
            code=self.code,
            scale_dtype=self.scale_dtype,
            dtype=x.dtype if dtype is None else jnp.dtype(dtype),
            tiles=tiles,
            chip=self.chip,
            interpret=self.interpret,
        )

        def of_stack(stack: Arrays) -> jax.Array:
            flat = {name: array.reshape(len(array), -1, array.shape[-1]) for name, array in stack.items()}
            return multiply(x, flat[CODES], flat[SCALES], flat.get(ZEROS), starts, first)

        branches = [partial(of_stack, stack) for stack in stacks]
        # Layers have arrays of their own on a CPU alone, where the kernel is interpreted.
        y = jax.lax.switch(index, branches) if len(branches) > 1 else branches[0]()
        result: jax.Array = y.reshape(len(x), *out)
        return result
