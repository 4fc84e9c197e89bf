"""The product of rows with a matrix whose elements are (code - zero) * scale, with a scale for each group of inputs."""

from pallas_kernels.quantized_matmul.reference import decoded, quantized_matmul

__all__ = ["decoded", "quantized_matmul"]
