"""Rows with a scale: each row of a matrix [.., in] is integers of eight bits, or FP8, and one scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.cpu_kernel import OnCpu
from jaxvllm.models.forms.few_bits import Elements, FewBits, largest_of, of_rows
from jaxvllm.models.forms.form import Arrays
from jaxvllm.models.forms.plain import xla_product
from jaxvllm.models.tiling import Fill
from pallas_kernels.chips import CpuChip
from pallas_kernels.quantized_matmul.code import INT8, Code

VALUES, SCALES = "values", "scales"


@dataclass(frozen=True)
class ScaledRows(FewBits):
    """A matrix is values [.., in], i8 or FP8, times scales f32[..].

    Where they are made of a matrix, the largest value of a row becomes the largest of the code: 127 or -127 of int8.
    Activations stay as they are, and sums are in float32. XLA multiplies: on TPU without a copy, and on GPU and CPU it
    first writes the matrix that it multiplies by in the dtype of the activations.
    """

    code: Code = field(default=INT8, kw_only=True)

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        scales = ParamDecl(matrix.shape[:-1], matrix.axes[:-1], "ones", dtype="float32", chosen=matrix.chosen)
        return {VALUES: replace(matrix, dtype=self.code.dtype), SCALES: scales}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        places = shardings[VALUES], shardings[SCALES]
        rounded = jax.jit(rounded_by_row, static_argnums=1, out_shardings=places)
        values, scales = rounded(matrix, self.code)
        return {VALUES: values, SCALES: scales}

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        return {VALUES: elements.codes, SCALES: of_rows(elements.scales)}

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return xla_product(x, arrays[VALUES].astype(x.dtype), dtype, is_slice, arrays[SCALES])


@dataclass(frozen=True)
class CpuInt8(OnCpu, ScaledRows):
    """Rows of int8, which our own kernel for CPUs reads where they are."""

    def operands(self, matrices: Sequence[Arrays]) -> tuple[list[jax.Array], list[jax.Array] | None]:
        return [arrays[VALUES] for arrays in matrices], [arrays[SCALES] for arrays in matrices]


def int8_form(chip: CpuChip | None) -> ScaledRows:
    """Returns the form of int8 for a CPU on which our own kernels run, or for none."""
    return ScaledRows() if chip is None else CpuInt8(chip)


def rounded_by_row(matrix: jax.Array, code: Code) -> tuple[jax.Array, jax.Array]:
    """Returns values [.., in] and scales f32[..] of a matrix [.., in]. A row of zeros has the scale 1.

    A row with a NaN has NaN for its scale. No scale is less than the normal numbers, which some devices take for 0.
    """
    exact = matrix.astype(jnp.float32)
    largest = largest_of(exact)
    # XLA would make this product of a division, and NumPy would not.
    scales = jnp.maximum(largest * np.float32(1 / code.largest), np.finfo(np.float32).tiny)
    scales = jnp.where(largest == 0, 1.0, scales)
    return code.rounded(exact / scales[..., None]), scales
