"""The form for our own kernel that decodes on CPUs: panels of the codes that a checkpoint stores, and their scales."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxvllm.models.forms.cpu_groups import CpuGroups
from jaxvllm.models.forms.few_bits import StoredAs
from pallas_kernels.decoded_matmul import decoded_matmul
from pallas_kernels.integer_matmul.code_panels import FLOAT8_UNIT, UNITS
from pallas_kernels.quantized_matmul.code import E4M3

_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class CpuDecoded(CpuGroups):
    """A matrix [.., out, in] of FP8, or of four bits that number the values of a table, in the arrays of `CpuGroups`.

    Tokens are multiplied as they are.
    """

    multiply: ClassVar[Callable[..., jax.Array]] = staticmethod(decoded_matmul)

    @staticmethod
    def takes_stored(stored: StoredAs, group: int | None) -> bool:
        """Tells whether the kernel knows the code and the scales, and groups of at most that size."""
        if stored.has_zeros or stored.scale_dtype not in _SCALES:
            return False
        if stored.code.is_by_table:
            return group is not None and group % UNITS[stored.code.bits] == 0
        return stored.code == E4M3 and (group is None or group % FLOAT8_UNIT == 0)
