"""W8A8: matrices in eight bits, and tokens that are rounded to the same code before they are multiplied."""

from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxvllm.models.forms.form import Arrays
from jaxvllm.models.forms.plain import xla_product
from jaxvllm.models.forms.scaled_rows import SCALES, VALUES, ScaledRows, rounded_by_row
from pallas_kernels.chips import Chip, CpuChip, GpuChip
from pallas_kernels.quantized_matmul.code import INT8, Code


@dataclass(frozen=True)
class RoundedTokens(ScaledRows):
    """The arrays of `ScaledRows`. The largest number of a token, of those that a device has, becomes the largest code.

    Sums of products of integers are exact, in int32, and those of FP8 are in float32. XLA multiplies.
    """

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        codes, sizes = rounded_by_row(x, self.code)
        return xla_product(codes, arrays[VALUES], x.dtype if dtype is None else dtype, is_slice, arrays[SCALES], sizes)


def multiplies(code: Code, chip: Chip | CpuChip | None) -> bool:
    """Tells whether XLA lets the matrix unit of a chip multiply numbers of this code, without a copy in another dtype.

    On NVIDIA GPUs XLA copies each layer's matrix of FP8 where it loops over layers (compiled HLO, H200), so there it is
    our own kernel that multiplies (`GpuGroups`).
    """
    if isinstance(chip, GpuChip):
        return code == INT8
    return chip is not None and not isinstance(chip, CpuChip) and code.name in chip.multiplies
