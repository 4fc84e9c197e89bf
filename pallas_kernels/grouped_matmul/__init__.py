"""The product of groups of rows with a matrix each: the experts that tokens have chosen, and no others."""

from pallas_kernels.grouped_matmul.api import grouped_gated_matmul, grouped_matmul
from pallas_kernels.grouped_matmul.largest import top_k
from pallas_kernels.grouped_matmul.order import RowOrder, order_rows
from pallas_kernels.grouped_matmul.reference import over_groups

__all__ = ["RowOrder", "grouped_gated_matmul", "grouped_matmul", "order_rows", "over_groups", "top_k"]
