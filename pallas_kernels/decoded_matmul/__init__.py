"""Products of rows with matrices of FP8 and of tables in panels of codes, in floating point, for CPUs."""

from pallas_kernels.decoded_matmul.api import decoded_matmul

__all__ = ["decoded_matmul"]
