"""States, such as those of linear attention, that take in the tokens of rows of any length, in pages."""

from pallas_kernels.linear_attention.length import of_length_one
from pallas_kernels.linear_attention.visits import Visits, plan_visits

__all__ = ["Visits", "of_length_one", "plan_visits"]
