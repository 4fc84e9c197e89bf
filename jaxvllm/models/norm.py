"""The norms of a model: each is a value that declares its arrays and computes with them, in float32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl


class Norm(Protocol):
    """A norm over the last dimension. It is frozen and hashable."""

    def declare(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> dict[str, ParamDecl]:
        """Returns its arrays for a weight of that name and shape."""

    def apply(self, weights: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
        """Normalises `x` with the arrays that it has declared under that name."""


@dataclass(frozen=True)
class RmsNorm:
    """RMS normalisation (arXiv 1910.07467): x / rms(x) * (weight + offset)."""

    eps: float
    offset: float = 0.0  # Gemma stores w and means 1 + w

    def declare(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> dict[str, ParamDecl]:
        # The initial weight plus offset is 1 in both cases.
        return {name: ParamDecl(shape, axes, "zeros" if self.offset else "ones")}

    def apply(self, weights: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
        return self.over(x, weights[name])

    def over(
        self,
        x: jax.Array,
        weight: jax.Array,
        axes: tuple[int, ...] = (-1,),
        mean: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> jax.Array:
        """Normalises `x`. The root mean square is taken over `axes` and, by `mean`, over devices."""
        y = x.astype(jnp.float32)
        squares = mean_square(y) if axes == (-1,) else jnp.mean(y * y, axis=axes, keepdims=True)
        y = y * jax.lax.rsqrt(mean(squares) + self.eps)
        return (y * (weight.astype(jnp.float32) + self.offset)).astype(x.dtype)


def mean_square(x: jax.Array) -> jax.Array:
    """Returns the mean [.., 1] of the squares of x f32[.., N].

    On CPUs halves are added up first. For a whole sum XLA writes the squares, and reads them again for sums of 32: 512
    norms of 512 took 156 us so, and 97 by halves (one thread of Zen 4).
    """

    def by_halves(x: jax.Array) -> jax.Array:
        sums, size = x * x, x.shape[-1]
        for _ in range(5):
            if size % 2 or size <= 16:
                break
            size //= 2
            sums = sums[..., :size] + sums[..., size:]
        return jnp.sum(sums, axis=-1, keepdims=True) / x.shape[-1]

    return jax.lax.platform_dependent(x, cpu=by_halves, default=lambda x: jnp.mean(x * x, axis=-1, keepdims=True))


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation (arXiv 1607.06450): (x - mean) / std * (weight + offset) + bias. Cohere's has no bias."""

    eps: float
    bias: bool = True
    offset: float = 0.0  # Nemotron stores w and means 1 + w
    has_weight: bool = True  # OLMo 1 has none

    def declare(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> dict[str, ParamDecl]:
        if not self.has_weight:
            return {}
        weight = {name: ParamDecl(shape, axes, "zeros" if self.offset else "ones")}
        return weight | {bias_of(name): ParamDecl(shape, axes, "zeros")} if self.bias else weight

    def apply(self, weights: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        if not self.has_weight:
            return y.astype(x.dtype)
        y = y * (weights[name].astype(jnp.float32) + self.offset)
        return (y + weights[bias_of(name)].astype(jnp.float32) if self.bias else y).astype(x.dtype)


def bias_of(name: str) -> str:
    """Returns the name of the bias that belongs to the weight of that name."""
    return f"{name}_bias"
