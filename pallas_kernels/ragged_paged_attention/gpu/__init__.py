"""Ragged paged attention for NVIDIA GPUs, in Pallas Mosaic GPU."""

from pallas_kernels.ragged_paged_attention.gpu.kernel import Plan, attend, make_plan

__all__ = ["Plan", "attend", "make_plan"]
