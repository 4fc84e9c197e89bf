"""Adds what adapters of low rank (LoRA) add to the products of rows, each of which may have an adapter of its own."""

from pallas_kernels.low_rank.api import add_low_rank

__all__ = ["add_low_rank"]
