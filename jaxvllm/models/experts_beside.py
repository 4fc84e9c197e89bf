"""`ExpertsBesideFfn`: experts and a dense FFN beside each other, each with norms of its own before and after it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.norm import RmsNorm


@dataclass(frozen=True, kw_only=True)
class ExpertsBesideFfn(ExpertsFfn):
    """The sum of norm(shared(norm(x))) and norm(experts(norm(x))) for the hidden state x itself (Gemma 4).

    The router reads x / rms(x) times a weight of its own, divided by the root of the hidden size. What an expert counts
    is multiplied by a number that the expert has learned.
    """

    norm: RmsNorm

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.shared is not None and not self.shared.bias and not self.bias, "the FFN beside them is no choice"
        assert self.output_scale == 1 and not (self.weighs_input or self.is_shared_gated), "no model has these"

    def declare(self) -> dict[str, ParamDecl]:
        names = ("shared_norm", "shared_post_norm", "experts_norm", "experts_post_norm")
        decls = super().declare() | {
            "router_scale": ParamDecl((self.hidden_size,), ("embed",), "ones", dtype="float32"),
            "router_counts": ParamDecl((self.router.num_experts,), (None,), "ones", dtype="float32"),
        }
        for name in names:
            decls |= self.norm.declare(name, (self.hidden_size,), ("embed",))
        return decls

    def apply_choosing(
        self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput
    ) -> tuple[jax.Array, jax.Array]:
        assert self.shared is not None
        scale = weights["router_scale"] * self.hidden_size**-0.5
        read = self.norm.over(x.astype(jnp.float32), scale)
        chosen, counts = self.router.choose(weights, read, given.backend)
        counts = counts * weights["router_counts"][chosen]
        experts = self._chosen(weights, self.norm.apply(weights, "experts_norm", x), chosen, counts, given)
        shared = self._shared(weights, self.norm.apply(weights, "shared_norm", x), self.shared)
        beside, together = self._axes_of_sums(given.axis)
        experts, shared = together.sum(jnp.stack([experts, beside.sum(shared)]))
        experts = self.norm.apply(weights, "experts_post_norm", experts)
        return self.norm.apply(weights, "shared_post_norm", shared) + experts, chosen
