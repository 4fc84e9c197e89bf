"""The kinds of feed-forward network that a layer can have: each is a value that declares its arrays and computes.

A new kind of FFN is a class beside `GatedFfn`, in a module of its own, which a family's spec names.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Activation, Gating
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.ops import activate, gated
from jaxvllm.models.positive import require_positive


class Ffn(Protocol):
    """The feed-forward network of a layer. It is frozen and hashable, and equal for layers that compute alike."""

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name. Layers share a stack of arrays that have one name and equal declarations."""

    def problem(self, size: int) -> str | None:
        """Returns why it cannot be spread over `size` devices, or None when it can."""

    def spread(self, size: int) -> Self:
        """Returns the same FFN with the arrays that `size` devices hold together."""

    def shard(self, size: int) -> Self:
        """Returns the part that each of `size` devices computes."""

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        """Returns the output [T, E] for x [T, E], summed over devices."""


class ChoosingFfn(ABC):
    """An FFN of many parts, the experts, of which each token chooses some."""

    @abstractmethod
    def apply_choosing(
        self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of `apply`, and the numbers of the experts that each token has chosen, i32[T, k]."""

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        """Returns the output [T, E] for x [T, E], summed over devices."""
        return self.apply_choosing(weights, x, given)[0]


@dataclass(frozen=True)
class _SplitFfn:
    """An FFN whose inner features are shared out among devices, each of which adds its part to the output."""

    hidden_size: int
    size: int

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size size")

    def problem(self, size: int) -> str | None:
        return f"an FFN of size {self.size} does not divide over {size} devices" if self.size % size else None

    def spread(self, size: int) -> Self:
        return self

    def shard(self, size: int) -> Self:
        return replace(self, size=self.size // size)

    def down(self, bias: bool) -> Linear:
        """Returns the projection of the inner features back to the hidden size."""
        return Linear((self.hidden_size, self.size), ("embed", "ffn"), bias)


@dataclass(frozen=True)
class GatedFfn(_SplitFfn):
    """A gated linear unit (arXiv 2002.05202): down(activation(gate x) * up x)."""

    activation: Gating = "silu"
    bias: bool = False

    @property
    def gate_up(self) -> Linear:
        """The projection to the gate and to the features that it multiplies."""
        return Linear((2, self.size, self.hidden_size), (None, "ffn", "embed"), self.bias)

    def declare(self) -> dict[str, ParamDecl]:
        return self.gate_up.declare("gate_up") | self.down(self.bias).declare("down")

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        h = self.gate_up.apply_gated(weights, "gate_up", x, self.activation)
        return self.down(self.bias).apply_summed(weights, "down", h, given.axis)


@dataclass(frozen=True, kw_only=True)
class ThresholdFfn(GatedFfn):
    """A gated FFN whose gate g lets few features through: g becomes relu(g - m - `threshold` s).

    m and s are the mean and the standard deviation of the gate's features, so that of gates with a normal distribution
    the part above the threshold of a standard one is left (Gemma 3n).
    """

    threshold: float

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        gate_up = self.gate_up.apply(weights, "gate_up", x)
        gate = gate_up[:, 0].astype(jnp.float32)
        mean = given.axis.mean(jnp.mean(gate, axis=-1, keepdims=True))
        spread = jnp.sqrt(given.axis.mean(jnp.mean((gate - mean) ** 2, axis=-1, keepdims=True)))
        gate = jax.nn.relu(gate - mean - self.threshold * spread).astype(x.dtype)
        h = gated(jnp.stack([gate, gate_up[:, 1]], axis=1), self.activation)
        return self.down(self.bias).apply_summed(weights, "down", h, given.axis)


@dataclass(frozen=True)
class PlainFfn(_SplitFfn):
    """Two matrices and no gate: down(activation(up x))."""

    activation: Activation
    bias: bool = True

    @property
    def up(self) -> Linear:
        """The projection to the inner features."""
        return Linear((self.size, self.hidden_size), ("ffn", "embed"), self.bias)

    def declare(self) -> dict[str, ParamDecl]:
        return self.up.declare("up") | self.down(self.bias).declare("down")

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        h = activate(self.up.apply(weights, "up", x), self.activation)
        return self.down(self.bias).apply_summed(weights, "down", h, given.axis)


@dataclass(frozen=True)
class XieluFfn(_SplitFfn):
    """Two matrices, and between them xIELU (arXiv 2411.13010), whose curves up and down the layer has learned.

    It is p x^2 + b x for x above 0, and n (e^min(x, eps) - 1 - x) + b x elsewhere, where p is the softplus of
    `xielu_up`, and n that of `xielu_down` plus b.
    """

    @property
    def up(self) -> Linear:
        """The projection to the inner features."""
        return Linear((self.size, self.hidden_size), ("ffn", "embed"))

    def declare(self) -> dict[str, ParamDecl]:
        numbers = ("xielu_up", "xielu_down", "xielu_slope", "xielu_eps")
        decls = {name: ParamDecl((1,), (None,), "zeros", dtype="float32") for name in numbers}
        return decls | self.up.declare("up") | self.down(False).declare("down")

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        h = self.up.apply(weights, "up", x).astype(jnp.float32)
        b, eps = weights["xielu_slope"], weights["xielu_eps"]
        above = jax.nn.softplus(weights["xielu_up"]) * h * h
        below = (b + jax.nn.softplus(weights["xielu_down"])) * (jnp.expm1(jnp.minimum(h, eps)) - h)
        h = (jnp.where(h > 0, above, below) + b * h).astype(x.dtype)
        return self.down(False).apply_summed(weights, "down", h, given.axis)
