"""Layers that are a short convolution between two gates (LFM2): y = C conv(B x), where B, C and x are of the token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import State, Token
from jaxvllm.models.state_mixer import StateMixer


@dataclass(frozen=True)
class WindowAlone:
    """Keeps nothing beside the window of the convolution, of which the layer reads the token's own values."""

    parts: ClassVar[tuple[tuple[int, ...], ...]] = ()
    taken_parts: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    def understand(self, weights: Mapping[str, jax.Array], mixed: jax.Array, token: Token) -> Token:
        return {"mixed": mixed}

    def update(self, state: State, token: Token) -> State:
        return state

    def read(self, state: State, token: Token) -> jax.Array:
        return token["mixed"]

    def run(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        return state, tokens["mixed"]


@dataclass(frozen=True)
class ShortConv(StateMixer):
    """A gated short convolution. Its channels know nothing of each other, and are in blocks that devices share out."""

    block_size: int  # channels of a block, C
    conv_size: int
    has_bias: bool  # of the convolution and both projections

    group_name: ClassVar[str] = "blocks of channels of a short convolution"

    @property
    def num_heads(self) -> int:
        return self.num_groups

    @property
    def rule(self) -> RecurrentRule:
        return RecurrentRule(self.conv, WindowAlone())

    @property
    def conv(self) -> CausalConv:
        return CausalConv(self.block_size, self.conv_size, self.has_bias, has_activation=False)

    @property
    def inputs(self) -> Linear:
        """The projection to, for each block, both gates and what is convolved: B, C and x."""
        shape = (self.num_groups, 3 * self.block_size, self.hidden_size)
        return Linear(shape, ("kv_heads", None, "embed"), self.has_bias)

    @property
    def output(self) -> Linear:
        return Linear((self.hidden_size, self.num_groups * self.block_size), ("embed", "heads"), self.has_bias)

    def declare(self) -> dict[str, ParamDecl]:
        decls = self.inputs.declare("conv_in") | self.output.declare("conv_out")
        return decls | self.conv.declare("conv_taps", self.num_groups)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        before, after, channels = jnp.split(self.inputs.apply(weights, "conv_in", x), 3, axis=-1)
        token = {CHANNELS: before * channels}
        read, kv = given.recur(kv, given, self.conv.weights(weights, "conv_taps"), token)
        out = after * read.astype(x.dtype)
        return self.output.apply_summed(weights, "conv_out", out.reshape(len(x), -1), given.axis), kv
