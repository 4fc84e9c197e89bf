"""`AltUp`: several hidden states of a token, of which a layer computes one (alternating updates, arXiv 2301.13310)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import Norm
from jaxvllm.models.positive import require_positive


@dataclass(frozen=True)
class AltUp:
    """A token has A hidden states, the first of which is its embedding, and the others projections of it.

    All states are predicted before a layer, each as itself and a sum over all with factors of the token's own. What the
    layer makes of one of them corrects them all, with other factors. A router that reads that state gives the factors:
    those of a prediction before the layer, those of a correction after it. Every device has all of it.
    """

    hidden_size: int
    count: int  # of the states, A
    active: int  # the number of the state that layers compute
    norm: Norm  # of what the router reads
    has_scale: bool  # whether what a layer's own embedding reads of that state is multiplied by learned factors

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size count")
        if not 0 <= self.active < self.count:
            raise ValueError(f"the state that layers compute must be one of {self.count}, not number {self.active}")

    @property
    def _square(self) -> Linear:
        return Linear((self.hidden_size, self.hidden_size), (None, "embed"))

    def declare(self) -> dict[str, ParamDecl]:
        """Returns the arrays outside the layers: two projections of each state but the first."""
        names = [f"altup_{way}_{number}" for way in ("in", "out") for number in range(1, self.count)]
        return {key: decl for name in names for key, decl in self._square.declare(name).items()}

    def declare_layer(self) -> dict[str, ParamDecl]:
        """Returns the arrays of one layer."""
        A, E = self.count, self.hidden_size
        decls = {
            "altup_router": ParamDecl((A, E), (None, "embed")),
            "altup_predict": ParamDecl((A, A, A), (None, None, None)),
            "altup_correct": ParamDecl((A, A), (None, None)),
        }
        if self.has_scale:
            decls["altup_scale"] = ParamDecl((E,), ("embed",), "ones")
        return decls | self.norm.declare("altup_norm", (E,), ("embed",))

    def begin(self, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Returns the states [T, A, E] of tokens with embeddings x [T, E]."""
        projected = (self._square.apply(params, f"altup_in_{number}", x) for number in range(1, self.count))
        return jnp.stack([x, *(_as_large(y, x) for y in projected)], axis=1)

    def end(self, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Returns one state [T, E], the mean of all, of the states x [T, A, E] after the last layer."""
        first, *others = self._each(x)
        projected = (self._square.apply(params, f"altup_out_{number}", y) for number, y in enumerate(others, 1))
        return jnp.mean(jnp.stack([first, *(_as_large(y, first) for y in projected)]), axis=0)

    def _each(self, x: jax.Array) -> Iterator[jax.Array]:
        return (x[:, number] for number in range(self.count))

    def predicted(self, weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Returns the prediction [T, A, E] from the states x [T, A, E] before a layer."""
        factors = jnp.einsum("ta,ija->tij", self._routed(weights, x[:, self.active]), _f32(weights["altup_predict"]))
        return (x + jnp.einsum("tij,tje->tie", factors, x.astype(jnp.float32))).astype(x.dtype)

    def corrected(self, weights: Mapping[str, Any], x: jax.Array, computed: jax.Array) -> jax.Array:
        """Returns the states [T, A, E], where `computed` [T, E] is what a layer has made of one of x [T, A, E]."""
        factors = jnp.einsum("ta,ia->ti", self._routed(weights, computed), _f32(weights["altup_correct"])) + 1
        news = (computed - x[:, self.active]).astype(jnp.float32)
        return (x + factors[:, :, None] * news[:, None]).astype(x.dtype)

    def shown(self, weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Returns what a layer's own embedding reads of the states x [T, A, E]: [T, E]."""
        state = x[:, self.active]
        return state * weights["altup_scale"].astype(x.dtype) if self.has_scale else state

    def _routed(self, weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Returns what the router says of states x [T, E], f32[T, A]."""
        read = _f32(self.norm.apply(weights, "altup_norm", x)) / self.hidden_size
        return jnp.tanh(read @ _f32(weights["altup_router"]).T)


def _as_large(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns x [T, E] with the root mean square of `like` [T, E], token by token."""
    wanted, own = (jnp.mean(_f32(y) ** 2, axis=-1, keepdims=True) for y in (like, x))
    return (_f32(x) * jnp.sqrt(wanted / jnp.maximum(own, 1e-5))).astype(x.dtype)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
