"""`StateKernel`: the kernel that lets the states of a memory take the tokens of a step in, and the choice of it."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jaxvllm.models.gpu_channels import GpuChannels
from jaxvllm.models.gpu_states import GpuStates
from jaxvllm.models.state_memory import StateMemory, Token
from jaxvllm.models.tpu_states import TpuStates
from pallas_kernels.backend import Backend
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
    kernels = (kind.of(memory, backend) for kind in (TpuStates, GpuStates, GpuChannels))
    return next((kernel for kernel in kernels if kernel is not None), None)
