"""The form of experts for our own kernel on NVIDIA GPUs."""

from dataclasses import dataclass
from functools import partial

import jax

from jaxvllm.models.forms.streamed_experts import ExpertsKernel, StreamedExperts
from pallas_kernels.chips import GpuChip
from pallas_kernels.small_matmul.api import Gate


@dataclass(frozen=True)
class GpuExperts(StreamedExperts):
    chip: GpuChip
    interpret: bool = False

    def kernel(self, x: jax.Array, stack: jax.Array, num_groups: int, gate: Gate | None) -> ExpertsKernel | None:
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.grouped_matmul import gpu

        tiles = gpu.choose_tiles(x, stack, num_groups, gate, self.chip)
        if tiles is None:
            return None
        return partial(gpu.grouped_matmul, gate=gate, tiles=tiles, chip=self.chip, interpret=self.interpret)
