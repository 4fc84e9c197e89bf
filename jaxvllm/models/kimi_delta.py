"""Kimi delta attention (arXiv 2510.26692): the gated delta rule, whose decay each channel of a key has for itself.

Each head keeps a matrix S with a row for each channel of a key. A token makes every row forget a part of its own,
S <- diag(exp(g)) S, and corrects what S says of a key: S <- S + k (beta (v - S^T k))^T. The layer reads S^T q. Before
that, each channel of q, k and v goes through a short causal convolution. A value head has a key head of its own.
"""

import math
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
from jaxvllm.models.positive import require_positive
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import State, Token
from jaxvllm.models.state_mixer import StateMixer
from pallas_kernels.linear_attention import of_length_one

# Tokens that are taken in together, at most. For 64 tokens, 32 heads and D 128 one core takes 8.3 ms in blocks of 8,
# 11.6 in blocks of 16, 104 in one block, and 17.3 one by one.
_BLOCK = 8


@dataclass(frozen=True)
class ChannelDelta:
    """The rule for one head."""

    size: int  # of queries, keys and values, D

    def __post_init__(self) -> None:
        require_positive(self, "size")

    @property
    def channels(self) -> int:
        """The channels of a query, a key and a value."""
        return 3 * self.size

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size, self.size),)

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"k": (self.size,), "v": (self.size,), "g": (self.size,), "beta": ()}

    def understand(self, weights: Mapping[str, jax.Array], mixed: jax.Array, token: Token) -> Token:
        """Returns q, k, v, g [D] and beta, which is a number."""
        q, k, v = jnp.split(mixed, 3)
        q, k = of_length_one(q) * self.size**-0.5, of_length_one(k)
        return {"q": q, "k": k, "v": v, "g": token["g"], "beta": token["beta"]}

    def update(self, state: State, token: Token) -> State:
        [matrix], k = state, token["k"][:, None]
        matrix = matrix * jnp.exp(token["g"])[:, None]
        error = token["v"] - jnp.sum(matrix * k, axis=0)
        return (matrix + k * (token["beta"] * error)[None],)

    def read(self, state: State, token: Token) -> jax.Array:
        return jnp.sum(state[0] * token["q"][:, None], axis=0)

    def run(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        """Takes in N tokens by products of matrices, a few at a time.

        What is left of one token at a later one depends on the channel, so it stands inside the product of their keys,
        which is a sum over channels of a block of tokens with itself. For long blocks these sums would cost more than
        all products. To divide decays up between the two keys would make those of early tokens too large for float32.
        """
        num_tokens = len(tokens["q"])
        size = math.gcd(num_tokens, _BLOCK)
        blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), dict(tokens))
        state, read = jax.lax.scan(self._run_block, state, blocks)
        return state, read.reshape(num_tokens, self.size)

    def _run_block(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        """Takes in a block of N tokens at once, as `GatedDelta.run` does."""
        [matrix], q, k, v, beta = state, tokens["q"], tokens["k"], tokens["v"], tokens["beta"][:, None]
        total = jnp.cumsum(tokens["g"], axis=0)  # [N, D]
        left = jnp.exp(total)
        earlier = jnp.tril(jnp.ones((len(k), len(k)), bool))[..., None]
        since = jnp.exp(jnp.where(earlier, total[:, None] - total[None], -jnp.inf))  # [N, N, D]
        exactly = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        system = jnp.tril(beta * jnp.sum(k[:, None] * k[None] * since, axis=-1), -1)
        errors = jax.lax.linalg.triangular_solve(
            system, beta * (v - exactly(k * left, matrix)), left_side=True, lower=True, unit_diagonal=True
        )
        read = exactly(q * left, matrix) + exactly(jnp.sum(q[:, None] * k[None] * since, axis=-1), errors)
        return (matrix * left[-1][:, None] + exactly((k * since[-1]).T, errors),), read


@dataclass(frozen=True)
class KimiDeltaNet(StateMixer):
    """A layer of Kimi delta attention, whose groups are heads. Its output is normed, and gated by a sigmoid."""

    delta: ChannelDelta
    conv_size: int
    norm: RmsNorm  # of what each head reads
    has_latents: bool = True  # decays and gates come from a few numbers each, and not from the hidden state (Ling 3)
    most_forgotten: float | None = None  # bounds -g, where nothing else does (None)

    group_name: ClassVar[str] = "heads of linear attention"

    @property
    def rule(self) -> RecurrentRule:
        return RecurrentRule(self.conv, self.delta)

    @property
    def conv(self) -> CausalConv:
        return CausalConv(self.delta.channels, self.conv_size)

    @property
    def num_heads(self) -> int:
        return self.num_groups

    @property
    def inputs(self) -> Linear:
        """The projection to the channels and the beta of each head."""
        return Linear((self.num_groups, self.delta.channels + 1, self.hidden_size), ("kv_heads", None, "embed"))

    @property
    def latents(self) -> Linear:
        """The projection to what decays come from, and to what the gates of the output come from.

        Every device computes it whole: it is small.
        """
        return Linear((2 * self.delta.size, self.hidden_size), (None, "embed"))

    @property
    def of_channels(self) -> Linear:
        """The projection from either of these, or from the hidden state, to a number for each channel of each head."""
        size = self.delta.size if self.has_latents else self.hidden_size
        return Linear((self.num_groups, self.delta.size, size), ("kv_heads", None, "embed"))

    @property
    def output(self) -> Linear:
        return Linear((self.hidden_size, self.num_groups * self.delta.size), ("embed", "heads"))

    def declare(self) -> dict[str, ParamDecl]:
        K = self.num_groups
        of_heads = ParamDecl((K,), ("kv_heads",), dtype="float32")
        of_channels = replace(of_heads, shape=(K, self.delta.size), axes=("kv_heads", None), init="zeros")
        decls = self.inputs.declare("kda_in") | self.output.declare("kda_out")
        decls |= self.latents.declare("kda_latents") if self.has_latents else {}
        decls |= self.of_channels.declare("kda_forget") | self.of_channels.declare("kda_gate")
        decls |= self.conv.declare("kda_conv", K) | {"kda_decay": of_heads, "kda_step_bias": of_channels}
        return decls | self.norm.declare("kda_norm", (self.delta.size,), (None,))

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        of_heads = self.inputs.apply(weights, "kda_in", x)
        of_decays = of_gates = x
        if self.has_latents:
            of_decays, of_gates = jnp.split(self.latents.apply(weights, "kda_latents", x), 2, axis=-1)
        steps = self.of_channels.apply(weights, "kda_forget", of_decays).astype(jnp.float32) + weights["kda_step_bias"]
        token = {
            CHANNELS: of_heads[..., :-1],
            "g": -self._forgotten(steps, jnp.exp(weights["kda_decay"])[:, None]),
            "beta": jax.nn.sigmoid(of_heads[..., -1].astype(jnp.float32)),
        }
        read, kv = given.recur(kv, given, self.conv.weights(weights, "kda_conv"), token)
        gate = self.of_channels.apply(weights, "kda_gate", of_gates).astype(jnp.float32)
        out = self.norm.apply(weights, "kda_norm", read) * jax.nn.sigmoid(gate)
        out = out.astype(x.dtype).reshape(len(x), -1)
        return self.output.apply_summed(weights, "kda_out", out, given.axis), kv

    def _forgotten(self, steps: jax.Array, rates: jax.Array) -> jax.Array:
        """Returns -g f32[T, K, D] for steps f32[T, K, D] and the rates f32[K, 1] of heads."""
        if self.most_forgotten is None:
            return rates * jax.nn.softplus(steps)
        return self.most_forgotten * jax.nn.sigmoid(rates * steps)
