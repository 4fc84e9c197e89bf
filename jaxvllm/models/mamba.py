"""Mamba (arXiv 2312.00752), the first one: layers whose state is a vector for each channel.

A token makes the state of channel i forget, each of its numbers at a pace of its own, and adds something to it:
h_i <- exp(dt_i A_i) h_i + dt_i x_i B. The layer reads C h_i + D_i x_i, and gates that. After a short causal
convolution, all channels of x together tell B, C and the steps dt. So the window of the convolution is a memory of its
own, and what it makes of all tokens of a step is projected at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.positive import require_positive
from jaxvllm.models.recurrence import CHANNELS, SKIP, RecurrentRule, one_by_one
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import State, StateMemory, Token
from jaxvllm.models.state_mixer import StateMixer

PACE = "pace"  # A among the weights of the rule, f32[K, S, C]
_NORMS = ("mamba1_dt_norm", "mamba1_b_norm", "mamba1_c_norm")


@dataclass(frozen=True)
class ChannelScan:
    """The recurrence of the channels of one block. Where drafts wait, each of them takes as much as a state."""

    num_channels: int  # of the block, C
    state_size: int  # S

    def __post_init__(self) -> None:
        require_positive(self, "num_channels state_size")

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return ((self.state_size, self.num_channels),)

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"g": (self.state_size, self.num_channels), "dx": (self.num_channels,), "b": (self.state_size,)}

    def understand(self, weights: Mapping[str, jax.Array], mixed: jax.Array, token: Token) -> Token:
        """Returns g = dt A [S, C], dx = dt x and skipped = D x [C], b and c [S]."""
        dt, skipped = token["dt"], weights[SKIP] * mixed
        return {"g": dt * weights[PACE], "dx": dt * mixed, "b": token["b"], "c": token["c"], "skipped": skipped}

    def update(self, state: State, token: Token) -> State:
        [kept] = state
        return (kept * jnp.exp(token["g"]) + token["dx"] * token["b"][:, None],)

    def read(self, state: State, token: Token) -> jax.Array:
        return jnp.sum(state[0] * token["c"][:, None], axis=0) + token["skipped"]

    def run(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        # Each number of a state forgets at its own pace, so that no product of matrices takes in several tokens.
        return one_by_one(self, state, tokens)


@dataclass(frozen=True)
class Mamba(StateMixer):
    """A layer of Mamba, whose channels are in blocks that devices share out."""

    scan: ChannelScan
    step_size: int  # of what the steps of all channels are made of
    conv_size: int
    has_conv_bias: bool = True
    has_bias: bool = False  # of the projections
    norm: RmsNorm | None = None  # of what tells B, C and steps
    has_norm_weights: bool = True

    group_name: ClassVar[str] = "blocks of channels of Mamba"

    @property
    def rule(self) -> RecurrentRule:
        return RecurrentRule(None, self.scan)

    @property
    def more_memories(self) -> tuple[StateMemory, ...]:
        return (StateMemory(self.num_groups, RecurrentRule(self.conv, WindowAlone())),)

    @property
    def conv(self) -> CausalConv:
        return CausalConv(self.scan.num_channels, self.conv_size, self.has_conv_bias)

    @property
    def num_heads(self) -> int:
        return self.num_groups

    @property
    def inputs(self) -> Linear:
        """The projection to, for each block, its channels and their gates."""
        shape = (self.num_groups, 2 * self.scan.num_channels, self.hidden_size)
        return Linear(shape, ("kv_heads", None, "embed"), self.has_bias)

    @property
    def told(self) -> Linear:
        """The projection of all channels to what tells the steps, B and C."""
        return Linear((sum(self._told_sizes), self.num_groups * self.scan.num_channels), (None, "heads"))

    @property
    def steps(self) -> Linear:
        """The projection to the steps of each block."""
        return Linear((self.num_groups, self.scan.num_channels, self.step_size), ("kv_heads", None, None))

    @property
    def output(self) -> Linear:
        shape = (self.hidden_size, self.num_groups * self.scan.num_channels)
        return Linear(shape, ("embed", "heads"), self.has_bias)

    @property
    def _told_sizes(self) -> tuple[int, int, int]:
        return self.step_size, self.scan.state_size, self.scan.state_size

    def declare(self) -> dict[str, ParamDecl]:
        K, C = self.num_groups, self.scan.num_channels
        decls = self.inputs.declare("mamba1_in") | self.told.declare("mamba1_told")
        decls |= self.steps.declare("mamba1_steps") | self.output.declare("mamba1_out")
        decls |= self.conv.declare("mamba1_taps", K)
        of_channels = ParamDecl((K, C), ("kv_heads", None), dtype="float32")
        decls |= {"mamba1_skip": of_channels, "mamba1_dt_bias": replace(of_channels, init="zeros")}
        decls["mamba1_decay"] = ParamDecl((K, C, self.scan.state_size), ("kv_heads", None, None), dtype="float32")
        if self.norm is not None and self.has_norm_weights:
            for name, size in zip(_NORMS, self._told_sizes, strict=True):
                decls |= self.norm.declare(name, (size,), (None,))
        return decls

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        channels, gates = jnp.split(self.inputs.apply(weights, "mamba1_in", x), 2, axis=-1)
        of_window = replace(given, memory=self.more_memories[0])
        mixed, kv = given.recur(kv, of_window, self.conv.weights(weights, "mamba1_taps"), {CHANNELS: channels})
        mixed = mixed.astype(x.dtype)
        dt, b, c = self._told(weights, mixed, given)
        dt = self.steps.apply(weights, "mamba1_steps", dt).astype(jnp.float32) + weights["mamba1_dt_bias"]
        b, c = (jnp.broadcast_to(of[:, None].astype(jnp.float32), (*mixed.shape[:2], of.shape[-1])) for of in (b, c))
        token = {CHANNELS: mixed, "dt": jax.nn.softplus(dt), "b": b, "c": c}
        pace = -jnp.exp(jnp.swapaxes(weights["mamba1_decay"], -1, -2))
        read, kv = given.recur(kv, given, {PACE: pace, SKIP: weights["mamba1_skip"]}, token)
        out = (read * jax.nn.silu(gates.astype(jnp.float32))).astype(x.dtype)
        return self.output.apply_summed(weights, "mamba1_out", out.reshape(len(x), -1), given.axis), kv

    def _told(self, weights: Mapping[str, Any], mixed: jax.Array, given: LayerInput) -> list[jax.Array]:
        """Returns what tells the steps, [T, step_size], and B and C, [T, S], of channels [T, K, C]."""
        told = self.told.apply_summed(weights, "mamba1_told", mixed.reshape(len(mixed), -1), given.axis)
        first, second, _ = self._told_sizes
        parts: list[jax.Array] = jnp.split(told, (first, first + second), axis=-1)
        if self.norm is None:
            return parts
        ones = jnp.ones((), jnp.float32)
        every = [weights[name] if self.has_norm_weights else ones for name in _NORMS]
        return [self.norm.over(part, weight) for part, weight in zip(parts, every, strict=True)]
