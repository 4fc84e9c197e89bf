"""The kinds of feed-forward network that a layer can have: each is a value that declares its arrays and computes.

A new kind of FFN is a class beside `GatedFfn`, in a module of its own, which a family's spec names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import jax

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.ops import Activation, activate, biased, project, project_gated
from sharding.axis import ModelAxis


class Ffn(Protocol):
    """The feed-forward network of a layer. It is frozen and hashable, and equal for layers that compute alike."""

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name. Layers share a stack of arrays that have one name and equal declarations."""

    def problem(self, size: int) -> str | None:
        """Returns why it cannot be spread over `size` devices, or None when it can."""

    def shard(self, size: int) -> Self:
        """Returns the part that each of `size` devices computes."""

    def apply(self, weights: Mapping[str, Any], x: jax.Array, axis: ModelAxis) -> jax.Array:
        """Returns the output [T, E] for x [T, E], summed over `axis`."""


@dataclass(frozen=True)
class _SplitFfn:
    """An FFN whose inner features are shared out among devices, each of which adds its part to the output."""

    hidden_size: int
    size: int

    def problem(self, size: int) -> str | None:
        return f"an FFN of size {self.size} does not divide over {size} devices" if self.size % size else None

    def shard(self, size: int) -> Self:
        return replace(self, size=self.size // size)

    def _down_decls(self, has_bias: bool) -> dict[str, ParamDecl]:
        decls = {"down": ParamDecl((self.hidden_size, self.size), ("embed", "ffn"), storage="matrix")}
        bias = {"down_bias": ParamDecl((self.hidden_size,), ("embed",), "zeros")}
        return decls | bias if has_bias else decls

    def _down(self, weights: Mapping[str, Any], h: jax.Array, axis: ModelAxis) -> jax.Array:
        return biased(axis.sum(project(h, weights["down"])), weights.get("down_bias"))


@dataclass(frozen=True)
class GatedFfn(_SplitFfn):
    """A gated linear unit (arXiv 2002.05202): down(activation(gate x) * up x)."""

    activation: Activation = "silu"
    bias: bool = False

    def declare(self) -> dict[str, ParamDecl]:
        E, F = self.hidden_size, self.size
        decls = {"gate_up": ParamDecl((2, F, E), (None, "ffn", "embed"), storage="matrix")}
        if self.bias:
            decls["gate_up_bias"] = ParamDecl((2, F), (None, "ffn"), "zeros")
        return decls | self._down_decls(self.bias)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, axis: ModelAxis) -> jax.Array:
        h = project_gated(x, weights["gate_up"], self.activation, weights.get("gate_up_bias"))
        return self._down(weights, h, axis)


@dataclass(frozen=True)
class PlainFfn(_SplitFfn):
    """Two matrices and no gate: down(activation(up x))."""

    activation: Activation
    bias: bool = True

    def declare(self) -> dict[str, ParamDecl]:
        E, F = self.hidden_size, self.size
        decls = {"up": ParamDecl((F, E), ("ffn", "embed"), storage="matrix")}
        if self.bias:
            decls["up_bias"] = ParamDecl((F,), ("ffn",), "zeros")
        return decls | self._down_decls(self.bias)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, axis: ModelAxis) -> jax.Array:
        h = activate(project(x, weights["up"], weights.get("up_bias")), self.activation)
        return self._down(weights, h, axis)
