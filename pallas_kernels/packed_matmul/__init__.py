"""The matrix product with a matrix `[out, in]` that lies in memory in the order in which kernels for CPUs read it."""

from pallas_kernels.packed_matmul.api import pack_into, packed_matmul
from pallas_kernels.packed_matmul.panels import Panels

__all__ = ["Panels", "pack_into", "packed_matmul"]
