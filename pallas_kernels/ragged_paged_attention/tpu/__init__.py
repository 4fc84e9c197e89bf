"""Ragged paged attention for TPU, in Pallas Mosaic TPU."""

from pallas_kernels.ragged_paged_attention.tpu.kernel import attend

__all__ = ["attend"]
