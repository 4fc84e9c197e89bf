"""Int8 by channel: each row of a matrix [.., in] is integers of eight bits and one scale, made at load time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.cpu_kernel import OnCpu
from jaxvllm.models.forms.form import Arrays, Form
from jaxvllm.models.forms.plain import xla_product
from pallas_kernels.chips import CpuChip

VALUES, SCALES = "values", "scales"


@dataclass(frozen=True)
class Int8(Form):
    """A matrix is values i8[.., in] times scales f32[..]: the largest value of a row is 127 or -127.

    Activations stay as they are, and sums are in float32. XLA multiplies: on TPU without a copy, and on GPU and CPU it
    first writes the matrix that it multiplies by in the dtype of the activations.
    """

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        scales = ParamDecl(matrix.shape[:-1], matrix.axes[:-1], "ones", dtype="float32")
        return {VALUES: replace(matrix, dtype="int8"), SCALES: scales}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        places = shardings[VALUES], shardings[SCALES]
        values, scales = jax.jit(rounded_by_row, out_shardings=places)(matrix)
        return {VALUES: values, SCALES: scales}

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return xla_product(x, arrays[VALUES].astype(x.dtype), dtype, is_slice, arrays[SCALES])


@dataclass(frozen=True)
class CpuInt8(OnCpu, Int8):
    """The same arrays, whose integers our own kernel for CPUs reads where they are."""

    def operands(self, matrices: Sequence[Arrays]) -> tuple[list[jax.Array], list[jax.Array] | None]:
        return [arrays[VALUES] for arrays in matrices], [arrays[SCALES] for arrays in matrices]


def int8_form(chip: CpuChip | None) -> Int8:
    """Returns the form for a CPU on which our own kernels run, or for none."""
    return Int8() if chip is None else CpuInt8(chip)


def rounded_by_row(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values i8[.., in] and scales f32[..] of a matrix [.., in]. A row of zeros has the scale 1."""
    exact = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), axis=-1)
    # XLA would make this product of a division by 127, and NumPy would not.
    scales = jnp.where(largest > 0, largest * np.float32(1 / 127), 1.0)
    return jnp.round(exact / scales[..., None]).astype(jnp.int8), scales
