"""The form of experts for a kernel that streams them from a device's memory: the array as checkpoints store it."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike

from jaxvllm.models.forms.form import Experts, Form, Gating
from jaxvllm.models.forms.plain import MATRIX, Plain
from pallas_kernels.small_matmul.api import Gate


class ExpertsKernel(Protocol):
    def __call__(self, x: jax.Array, w: jax.Array, starts: jax.Array, first: jax.Array | int) -> jax.Array:
        """Multiplies each row of x [N, in] by matrix `first` + g of w [.., out, in], where g is its group: [N, out]."""


@dataclass(frozen=True)
class StreamedExperts(Plain):
    """One array, of which the kernel reads the experts that have rows.

    Where there is no kernel for a matrix, XLA multiplies in a loop, as it does for a plain array.
    """

    @abstractmethod
    def kernel(self, x: jax.Array, stack: jax.Array, num_groups: int, gate: Gate | None) -> ExpertsKernel | None:
        """Returns what multiplies x by matrices of this stack, or None where no kernel does."""

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        y = self._product(x, experts, starts, None) if dtype in (None, x.dtype) else None
        return super().grouped_product(x, experts, starts, dtype) if y is None else y

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return self._product(x, experts, starts, gating)

    def _product(self, x: jax.Array, experts: Experts, starts: jax.Array, gate: Gate | None) -> jax.Array | None:
        stacks = [arrays[MATRIX] for arrays in experts.stacks]
        multiply = self.kernel(x, stacks[0], len(starts) - 1, gate)
        if multiply is None:
            return None
        branches = [partial(multiply, x, stack, starts, experts.first) for stack in stacks]
        # Layers have arrays of their own on a CPU alone, where the kernel is interpreted.
        result: jax.Array = jax.lax.switch(experts.index, branches) if len(branches) > 1 else branches[0]()
        return result

    def wrapped(self, arrays: Mapping[str, Any]) -> Any:
        return Form.wrapped(self, arrays)  # its node says which kernel multiplies
