"""`StateKernel`: the kernel that lets the states of a memory take the tokens of a step in, and the choice of it."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jaxvllm.models.state_memory import StateMemory, Token
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip, TpuChip
from pallas_kernels.ragged_paged_attention import RaggedRows


class StateKernel(Protocol):
    """A kernel for the states of one memory."""

    def plan(self, rows: RaggedRows, page_size: int) -> Any:
        """Makes what all layers of a step share, which only the same kernel understands."""

    def __call__(
        self, pages: jax.Array, place: jax.Array | int, plan: Any, weights: Mapping[str, jax.Array], tokens: Token
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what `StateMemory.advance` returns for a step with such a plan, but for rounding."""


def state_kernel(memory: StateMemory, backend: Backend) -> StateKernel | None:
    """Returns the kernel for `memory`, or None where the backend has none for it: then plain XLA computes."""
    # Imported for their chips alone: they import the layers of all models with states, 13 ms of each start.
    if isinstance(backend.chip, TpuChip):
        from jaxvllm.models.tpu_states import TpuStates

        return TpuStates.of(memory, backend)
    if isinstance(backend.chip, GpuChip):
        from jaxvllm.models.gpu_channels import GpuChannels
        from jaxvllm.models.gpu_states import GpuStates

        return GpuStates.of(memory, backend) or GpuChannels.of(memory, backend)
    return None
