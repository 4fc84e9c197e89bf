"""Ragged paged attention for NVIDIA GPUs, in Pallas Mosaic GPU."""

from pallas_kernels.ragged_paged_attention.gpu.kernel import AttendPlan, attend, make_plan

__all__ = ["AttendPlan", "attend", "make_plan"]
