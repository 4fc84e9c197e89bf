"""Ragged paged attention for CPUs, in machine code that Python writes."""

from pallas_kernels.ragged_paged_attention.cpu.call import attend

__all__ = ["attend"]
