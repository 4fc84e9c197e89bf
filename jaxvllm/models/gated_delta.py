"""The gated delta rule (arXiv 2412.06464), and the layers of linear attention that use it (Qwen3-Next, Qwen 3.5).

Each value head keeps a matrix S. A token makes it forget a part, S <- exp(g) S, and corrects what it says of a key:
S <- S + k (beta (v - S^T k))^T. The layer reads S^T q. Before that, a short causal convolution mixes each channel of
q, k and v with the tokens before it, which is why the state has their last channels, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.state_memory import State, StateMemory, Token

# Added to the squared length of queries and keys before they are divided by it.
_EPS = 1e-6


@dataclass(frozen=True)
class GatedDeltaRule:
    """The rule for one key head and the value heads that share it. All of it is in float32."""

    values_per_key: int  # value heads of a key head, r
    key_size: int
    value_size: int
    conv_size: int  # tokens that the convolution sees, the present one included

    @property
    def channels(self) -> int:
        """The channels of a query, a key, and the values that belong to it."""
        return 2 * self.key_size + self.values_per_key * self.value_size

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return (self.values_per_key, self.key_size, self.value_size), (self.conv_size - 1, self.channels)

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        of_values, v = (self.values_per_key,), (self.values_per_key, self.value_size)
        return {"channels": (self.channels,), "k": (self.key_size,), "v": v, "g": of_values, "beta": of_values}

    def take(self, weights: Mapping[str, jax.Array], state: State, token: Token) -> tuple[State, jax.Array, Token]:
        """Takes in `token`, which has channels f[K, C], `g` and `beta` f32[K, r]; reads f32[K, r, Dv].

        `weights` are those of the convolution, f32[K, conv_size, C].
        """
        channels = token["channels"].astype(jnp.float32)
        seen = jnp.concatenate([state[1], channels[:, None]], axis=1)
        q, k, v = self._mixed(jnp.sum(seen * weights["conv"], axis=1))
        taken = {"channels": channels, "k": k, "v": v, "g": token["g"], "beta": token["beta"]}
        state = self.retake(state, taken)
        return state, jnp.sum(state[0] * q[:, None, :, None], axis=-2), taken

    def take_run(
        self, weights: Mapping[str, jax.Array], state: State, tokens: Token, count: jax.Array
    ) -> tuple[State, jax.Array]:
        """Takes in up to N tokens by products of matrices (section 3 of the paper).

        What a token corrects depends on what those before it in the run have corrected, which is a system of equations
        with a triangular matrix.
        """
        matrix, before = state
        N = len(tokens["g"])
        is_real = (jnp.arange(N) < count)[:, None, None]
        # Tokens that are too much are another row's: whatever they are, nothing of them gets in.
        tokens = {name: jnp.where(is_real, x.astype(jnp.float32), 0) for name, x in tokens.items()}
        channels = jnp.concatenate([before, jnp.moveaxis(tokens["channels"], 0, 1)], axis=1)
        seen = jnp.stack([channels[:, i : i + N] for i in range(self.conv_size)], axis=2)
        q, k, v = self._mixed(jnp.sum(seen * weights["conv"][:, None], axis=2))  # [K, N, ..]
        g, beta = (jnp.moveaxis(tokens[name], 0, 2) for name in ("g", "beta"))  # [K, r, N]
        decay = jnp.cumsum(g, axis=-1)
        since = decay[..., :, None] - decay[..., None, :]  # from token j to token i, [K, r, N, N]
        earlier = jnp.tril(jnp.ones((N, N), bool))
        since = jnp.exp(jnp.where(earlier, since, -jnp.inf))  # exp alone would overflow
        exactly = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        v = jnp.moveaxis(v, 2, 1)  # [K, r, N, Dv]
        said = exactly("kid,krdv->kriv", k, matrix) * jnp.exp(decay)[..., None]
        system = jnp.tril(exactly("kid,kjd->kij", k, k)[:, None] * since * beta[..., None], -1)
        errors = jax.lax.linalg.triangular_solve(
            system, beta[..., None] * (v - said), left_side=True, lower=True, unit_diagonal=True
        )
        read = exactly("kid,krdv->kriv", q, matrix) * jnp.exp(decay)[..., None]
        read = read + exactly("krij,krjv->kriv", exactly("kid,kjd->kij", q, k)[:, None] * since, errors)
        last = decay[..., -1:]
        matrix = matrix * jnp.exp(last)[..., None]
        matrix = matrix + exactly("kjd,krjv->krdv", k, errors * jnp.exp(last - decay)[..., None])
        before = jax.lax.dynamic_slice_in_dim(channels, count, self.conv_size - 1, axis=1)
        return (matrix, before), jnp.moveaxis(read, 2, 0)

    def _mixed(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q and k [.., Dk] and v [.., r, Dv] of what the convolution made of channels [.., C]."""
        q, k, v = jnp.split(jax.nn.silu(channels), (self.key_size, 2 * self.key_size), axis=-1)
        q = _of_length_one(q) * self.key_size**-0.5
        return q, _of_length_one(k), v.reshape(*v.shape[:-1], self.values_per_key, self.value_size)

    def retake(self, state: State, taken: Token) -> State:
        matrix, before = state
        k = taken["k"][:, None, :, None]
        matrix = matrix * jnp.exp(taken["g"])[..., None, None]
        error = taken["v"] - jnp.sum(matrix * k, axis=-2)
        matrix = matrix + k * (taken["beta"][..., None] * error)[..., None, :]
        return matrix, jnp.concatenate([before[:, 1:], taken["channels"][:, None]], axis=1)


@dataclass(frozen=True)
class GatedDeltaNet:
    """A layer's mixer of tokens that keeps a state, in the place of its attention. Its output is normed and gated."""

    hidden_size: int
    num_key_heads: int
    rule: GatedDeltaRule
    norm: RmsNorm  # of what each value head reads

    head_size: ClassVar[int] = 0  # no rope turns anything
    keeps: ClassVar[bool] = True

    @property
    def num_heads(self) -> int:
        return self.num_key_heads * self.rule.values_per_key

    def memory(self, window: int | None) -> StateMemory:
        return StateMemory(self.num_key_heads, self.rule)

    @property
    def inputs(self) -> Linear:
        """The projection to, for each key head, the channels, the gates of the values' outputs, and beta and decay."""
        rule = self.rule
        each = rule.channels + rule.values_per_key * (rule.value_size + 2)
        return Linear((self.num_key_heads, each, self.hidden_size), ("kv_heads", None, "embed"))

    @property
    def output(self) -> Linear:
        return Linear((self.hidden_size, self.num_heads * self.rule.value_size), ("embed", "heads"))

    def declare(self) -> dict[str, ParamDecl]:
        K, rule = self.num_key_heads, self.rule
        of_heads = ParamDecl((K, rule.values_per_key), ("kv_heads", None), dtype="float32")
        conv = ParamDecl((K, rule.channels, rule.conv_size), ("kv_heads", None, None))
        decls = self.inputs.declare("delta_in") | self.output.declare("delta_out")
        decls |= {"delta_conv": conv, "delta_decay": of_heads, "delta_step_bias": replace(of_heads, init="zeros")}
        return decls | self.norm.declare("delta_norm", (rule.value_size,), (None,))

    def kv_copies(self, size: int) -> int:
        return 1

    def problem(self, size: int) -> str | None:
        if self.num_key_heads % size:
            return f"{self.num_key_heads} key heads of linear attention do not divide over {size} devices"
        return None

    def spread(self, size: int) -> Self:
        return self

    def shard(self, size: int) -> Self:
        return replace(self, num_key_heads=self.num_key_heads // size)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        rule = self.rule
        r = rule.values_per_key
        ends = (rule.channels, rule.channels + r * rule.value_size, rule.channels + r * (rule.value_size + 1))
        channels, gate, beta, decay = jnp.split(self.inputs.apply(weights, "delta_in", x), ends, axis=-1)
        steps = jax.nn.softplus(decay.astype(jnp.float32) + weights["delta_step_bias"])
        token = {
            "channels": channels,
            "g": -jnp.exp(weights["delta_decay"]) * steps,
            "beta": jax.nn.sigmoid(beta.astype(jnp.float32)),
        }
        conv = jnp.swapaxes(weights["delta_conv"], -1, -2).astype(jnp.float32)
        read, kv = given.recur(kv, given, {"conv": conv}, token)
        gate = gate.reshape(read.shape).astype(jnp.float32)
        out = self.norm.apply(weights, "delta_norm", read) * jax.nn.silu(gate)
        out = out.astype(x.dtype).reshape(len(x), -1)
        return self.output.apply_summed(weights, "delta_out", out, given.axis), kv


def _of_length_one(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
