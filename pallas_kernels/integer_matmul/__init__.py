"""Products of rows with matrices of integers of four to eight bits, in integer arithmetic, for CPUs."""

from pallas_kernels.integer_matmul.api import (
    TokenCodes,
    integer_matmul,
    rounded_tokens,
)
from pallas_kernels.integer_matmul.code_panels import CodePanels

__all__ = [
    "CodePanels",
    "TokenCodes",
    "integer_matmul",
    "rounded_tokens",
]
