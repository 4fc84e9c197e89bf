"""Ragged paged attention for NVIDIA GPUs that multiply from registers only, in Pallas Mosaic GPU."""

from pallas_kernels.ragged_paged_attention.gpu_mma.kernel import attend, make_plan

__all__ = ["attend", "make_plan"]
