"""The matrix product of rows with a matrix `[out, in]`, for CPUs. XLA's own is fast for one row and for hundreds."""

from pallas_kernels.small_matmul.api import small_matmul

__all__ = ["small_matmul"]
