"""The gated delta rule (arXiv 2412.06464), and the layers of linear attention that use it (Qwen3-Next, Qwen 3.5).

Each value head keeps a matrix S. A token makes it forget a part, S <- exp(g) S, and corrects what it says of a key:
S <- S + k (beta (v - S^T k))^T. The layer reads S^T q. Before that, each channel of q, k and v goes through a short
causal convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule, decays
from jaxvllm.models.state_memory import State, Token
from jaxvllm.models.state_mixer import StateMixer
from pallas_kernels.linear_attention import of_length_one


@dataclass(frozen=True)
class GatedDelta:
    """The rule for one key head and the value heads that share it."""

    values_per_key: int  # value heads of a key head, r
    key_size: int
    value_size: int

    @property
    def channels(self) -> int:
        """The channels of a query, a key, and the values that belong to it."""
        return 2 * self.key_size + self.values_per_key * self.value_size

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return ((self.values_per_key, self.key_size, self.value_size),)

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        r = self.values_per_key
        return {"k": (self.key_size,), "v": (r, self.value_size), "g": (r,), "beta": (r,)}

    def understand(self, weights: Mapping[str, jax.Array], mixed: jax.Array, token: Token) -> Token:
        """Returns q, k [Dk], v [r, Dv], g and beta [r]."""
        q, k, v = jnp.split(mixed, (self.key_size, 2 * self.key_size))
        q, k = of_length_one(q) * self.key_size**-0.5, of_length_one(k)
        v = v.reshape(self.values_per_key, self.value_size)
        return {"q": q, "k": k, "v": v, "g": token["g"], "beta": token["beta"]}

    def update(self, state: State, token: Token) -> State:
        [matrix], k = state, token["k"][None, :, None]
        matrix = matrix * jnp.exp(token["g"])[:, None, None]
        error = token["v"] - jnp.sum(matrix * k, axis=-2)
        return (matrix + k * (token["beta"][:, None] * error)[:, None, :],)

    def read(self, state: State, token: Token) -> jax.Array:
        return jnp.sum(state[0] * token["q"][None, :, None], axis=-2)

    def run(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        """Takes in N tokens by products of matrices (section 3 of the paper).

        What a token corrects depends on what those before it in the run have corrected, which is a system of equations
        with a triangular matrix.
        """
        [matrix], q, k, v = state, tokens["q"], tokens["k"], jnp.moveaxis(tokens["v"], 1, 0)  # [r, N, Dv]
        beta = tokens["beta"].T[..., None]  # [r, N, 1]
        since, left = decays(tokens["g"].T)
        exactly = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        said = exactly("id,rdv->riv", k, matrix) * left[..., None]
        system = jnp.tril(exactly("id,jd->ij", k, k) * since * beta, -1)
        errors = jax.lax.linalg.triangular_solve(
            system, beta * (v - said), left_side=True, lower=True, unit_diagonal=True
        )
        read = exactly("id,rdv->riv", q, matrix) * left[..., None]
        read = read + exactly("rij,rjv->riv", exactly("id,jd->ij", q, k) * since, errors)
        matrix = matrix * left[:, -1, None, None]
        matrix = matrix + exactly("jd,rjv->rdv", k, errors * since[:, -1, :, None])
        return (matrix,), jnp.moveaxis(read, 1, 0)


@dataclass(frozen=True)
class GatedDeltaNet(StateMixer):
    """A layer of linear attention, whose groups are key heads. Its output is normed and gated."""

    delta: GatedDelta
    conv_size: int
    norm: RmsNorm  # of what each value head reads

    group_name: ClassVar[str] = "key heads of linear attention"

    @property
    def rule(self) -> RecurrentRule:
        return RecurrentRule(self.conv, self.delta)

    @property
    def conv(self) -> CausalConv:
        return CausalConv(self.delta.channels, self.conv_size)

    @property
    def num_heads(self) -> int:
        return self.num_groups * self.delta.values_per_key

    @property
    def inputs(self) -> Linear:
        """The projection to, for each key head, the channels and the gates of the values' outputs."""
        return self._of_group(self.delta.channels + self.delta.values_per_key * self.delta.value_size)

    @property
    def steps(self) -> Linear:
        """The projection to, for each key head, beta and decay.

        With these few rows after them, the 768 others of Qwen 3.5 would fill no whole tiles of a TPU. Then XLA copied
        the stack in each step: 381 MB of Qwen3.5-35B-A3B on 1x4 v6e.
        """
        return self._of_group(2 * self.delta.values_per_key)

    def _of_group(self, count: int) -> Linear:
        return Linear((self.num_groups, count, self.hidden_size), ("kv_heads", None, "embed"))

    @property
    def output(self) -> Linear:
        return Linear((self.hidden_size, self.num_heads * self.delta.value_size), ("embed", "heads"))

    def declare(self) -> dict[str, ParamDecl]:
        K = self.num_groups
        of_heads = ParamDecl((K, self.delta.values_per_key), ("kv_heads", None), dtype="float32")
        decls = self.inputs.declare("delta_in") | self.steps.declare("delta_steps") | self.output.declare("delta_out")
        decls |= self.conv.declare("delta_conv", K) | {
            "delta_decay": of_heads,
            "delta_step_bias": replace(of_heads, init="zeros"),
        }
        return decls | self.norm.declare("delta_norm", (self.delta.value_size,), (None,))

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        delta, r = self.delta, self.delta.values_per_key
        channels, gate = jnp.split(self.inputs.apply(weights, "delta_in", x), [delta.channels], axis=-1)
        beta, decay = jnp.split(self.steps.apply(weights, "delta_steps", x), [r], axis=-1)
        steps = jax.nn.softplus(decay.astype(jnp.float32) + weights["delta_step_bias"])
        token = {
            CHANNELS: channels,
            "g": -jnp.exp(weights["delta_decay"]) * steps,
            "beta": jax.nn.sigmoid(beta.astype(jnp.float32)),
        }
        read, kv = given.recur(kv, given, self.conv.weights(weights, "delta_conv"), token)
        gate = gate.reshape(read.shape).astype(jnp.float32)
        out = self.norm.apply(weights, "delta_norm", read) * jax.nn.silu(gate)
        out = out.astype(x.dtype).reshape(len(x), -1)
        return self.output.apply_summed(weights, "delta_out", out, given.axis), kv
