"""The matrix product of few rows with a matrix `[out, in]`, for CPUs, where XLA takes up to three times as long."""

from pallas_kernels.small_matmul.api import Gate, small_gated_matmul, small_matmul

__all__ = ["Gate", "small_gated_matmul", "small_matmul"]
