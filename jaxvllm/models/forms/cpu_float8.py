"""The form for our own kernel for FP8 on CPUs: panels of the codes that a checkpoint stores, and of their scales."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxvllm.models.forms.cpu_groups import CpuGroups, stacks_of
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.form import Arrays, Experts, Gating
from pallas_kernels.float8_matmul import float8_matmul
from pallas_kernels.integer_matmul.code_panels import FLOAT8_UNIT
from pallas_kernels.quantized_matmul.code import E4M3

_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class CpuFloat8(CpuGroups):
    """A matrix [.., out, in] of FP8, in the arrays of `CpuGroups`. Tokens are multiplied as they are."""

    @staticmethod
    def takes_stored(stored: StoredAs, group: int | None) -> bool:
        """Tells whether the kernel knows the code and the scales, and groups of at most that size."""
        takes_group = group is None or group % FLOAT8_UNIT == 0
        return stored.code == E4M3 and stored.scale_dtype in _SCALES and takes_group and not stored.has_zeros

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        y = float8_matmul(x, matrices, index, dtype=dtype, **self._options(x))
        return y.reshape(len(x), *self.outs)

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return float8_matmul(x, matrices, index, gate=gating, **self._options(x))

    def grouped_product(self, x: jax.Array, experts: Experts, starts: jax.Array) -> jax.Array:
        y = float8_matmul(x, stacks_of(experts), experts.index, starts=starts, **self._options(x))
        return y.reshape(len(x), *self.outs[1:])

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return float8_matmul(x, stacks_of(experts), experts.index, starts=starts, gate=gating, **self._options(x))
