"""The form of experts for our own kernel on TPUs: the array as checkpoints store it, multiplied where it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxvllm.models.forms.form import Experts, Form, Gating
from jaxvllm.models.forms.plain import MATRIX, Plain
from pallas_kernels.chips import TpuChip
from pallas_kernels.small_matmul.api import Gate


@dataclass(frozen=True)
class TpuExperts(Plain):
    """One array, of which the kernel reads the experts that have rows.

    Where it has no room for a matrix, XLA multiplies in a loop, as it does for a plain array.
    """

    chip: TpuChip
    interpret: bool = False

    def grouped_product(self, x: jax.Array, experts: Experts, starts: jax.Array) -> jax.Array:
        y = self._product(x, experts, starts, None)
        return super().grouped_product(x, experts, starts) if y is None else y

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        return self._product(x, experts, starts, gating)

    def _product(self, x: jax.Array, experts: Experts, starts: jax.Array, gate: Gate | None) -> jax.Array | None:
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.grouped_matmul import tpu

        stacks = [arrays[MATRIX] for arrays in experts.stacks]
        blocks = tpu.choose_blocks(x, stacks[0], gate, self.chip)
        if blocks is None:
            return None
        multiply = partial(tpu.grouped_matmul, gate=gate, blocks=blocks, chip=self.chip, interpret=self.interpret)
        branches = [partial(multiply, x, stack, starts, experts.first) for stack in stacks]
        # Layers have arrays of their own on a CPU alone, where the kernel is interpreted.
        result: jax.Array = jax.lax.switch(experts.index, branches) if len(branches) > 1 else branches[0]()
        return result

    def wrapped(self, arrays: Mapping[str, Any]) -> Any:
        return Form.wrapped(self, arrays)  # its node says which kernel multiplies
