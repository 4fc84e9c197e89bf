"""`ScaledFfn`: a gated FFN whose gate is multiplied by a number before its activation, and its output by another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.ops import gated
from jaxvllm.models.positive import require_positive


@dataclass(frozen=True)
class ScaledFfn(GatedFfn):
    """Returns out_scale * down(activation(gate_scale * gate x) * up x)."""

    gate_scale: float = 1.0
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "gate_scale out_scale")

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        gate_up = self.gate_up.apply(weights, "gate_up", x)  # [T, 2, F]
        h = gated(jnp.stack([self.gate_scale * gate_up[:, 0], gate_up[:, 1]], axis=1), self.activation)
        return self.out_scale * self.down(self.bias).apply_summed(weights, "down", h, given.axis)
