"""The form of experts for our own kernel on TPUs."""

from dataclasses import dataclass
from functools import partial

import jax

from jaxvllm.models.forms.streamed_experts import ExpertsKernel, StreamedExperts
from pallas_kernels.chips import TpuChip
from pallas_kernels.small_matmul.api import Gate


@dataclass(frozen=True)
class TpuExperts(StreamedExperts):
    chip: TpuChip
    interpret: bool = False

    def kernel(self, x: jax.Array, stack: jax.Array, num_groups: int, gate: Gate | None) -> ExpertsKernel | None:
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.grouped_matmul import tpu

        blocks = tpu.choose_blocks(x, stack, gate, self.chip)
        if blocks is None:
            return None
        return partial(tpu.grouped_matmul, gate=gate, blocks=blocks, chip=self.chip, interpret=self.interpret)
