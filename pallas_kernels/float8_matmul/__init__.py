"""Products of rows with matrices of FP8 in panels of codes, in floating point, for CPUs."""

from pallas_kernels.float8_matmul.api import float8_matmul

__all__ = ["float8_matmul"]
