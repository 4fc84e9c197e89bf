"""Ragged paged attention for TPU, in Pallas Mosaic TPU."""

from pallas_kernels.ragged_paged_attention.tpu.kernel import attend
from pallas_kernels.ragged_paged_attention.tpu.scales import write_scales

__all__ = ["attend", "write_scales"]
