"""The form for our own kernel for FP8 on CPUs: panels of the codes that a checkpoint stores, and of their scales."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxvllm.models.forms.cpu_groups import CpuGroups
from jaxvllm.models.forms.few_bits import StoredAs
from pallas_kernels.float8_matmul import float8_matmul
from pallas_kernels.integer_matmul.code_panels import FLOAT8_UNIT
from pallas_kernels.quantized_matmul.code import E4M3

_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class CpuFloat8(CpuGroups):
    """A matrix [.., out, in] of FP8, in the arrays of `CpuGroups`. Tokens are multiplied as they are."""

    multiply: ClassVar[Callable[..., jax.Array]] = staticmethod(float8_matmul)

    @staticmethod
    def takes_stored(stored: StoredAs, group: int | None) -> bool:
        """Tells whether the kernel knows the code and the scales, and groups of at most that size."""
        takes_group = group is None or group % FLOAT8_UNIT == 0
        return stored.code == E4M3 and stored.scale_dtype in _SCALES and takes_group and not stored.has_zeros
