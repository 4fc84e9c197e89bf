"""Mamba-2 (arXiv 2405.21060): layers whose state is a matrix for each head, and whose heads share B and C in groups.

A token makes the state of its head forget a part, and adds its values in the direction B: h <- exp(dt A) h + dt x B^T.
The layer reads h C + D x. Before that, x, B and C go through a short causal convolution. What is read is gated, and
then normed over each group.

Steps dt are clamped wherever a token comes from. The code of transformers clamps them in prompts alone, and not in
tokens that are decoded one by one, which makes the answer depend on where a prompt ends. By default there are no
limits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.declaration import HeadGroups, ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.positive import require_positive
from jaxvllm.models.recurrence import CHANNELS, SKIP, RecurrentRule, decays
from jaxvllm.models.state_memory import State, Token
from jaxvllm.models.state_mixer import StateMixer
from sharding.axis import ModelAxis


@dataclass(frozen=True)
class SelectiveScan:
    """The recurrence of the heads of one group."""

    num_heads: int  # of the group, H
    head_size: int  # P
    state_size: int  # S

    def __post_init__(self) -> None:
        require_positive(self, "num_heads head_size state_size")

    @property
    def values(self) -> int:
        """The channels of x."""
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """The channels of x, B and C."""
        return self.values + 2 * self.state_size

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return ((self.num_heads, self.head_size, self.state_size),)

    @property
    def taken_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"dx": (self.num_heads, self.head_size), "b": (self.state_size,), "g": (self.num_heads,)}

    def understand(self, weights: Mapping[str, jax.Array], mixed: jax.Array, token: Token) -> Token:
        """Returns dx = dt x and skipped = D x [H, P], b and c [S], and g = dt A [H]."""
        x, b, c = jnp.split(mixed, (self.values, self.values + self.state_size))
        x = x.reshape(self.num_heads, self.head_size)
        skipped = weights[SKIP][:, None] * x
        return {"dx": token["dt"][:, None] * x, "b": b, "c": c, "g": token["g"], "skipped": skipped}

    def update(self, state: State, token: Token) -> State:
        [kept] = state
        return (kept * jnp.exp(token["g"])[:, None, None] + token["dx"][:, :, None] * token["b"],)

    def read(self, state: State, token: Token) -> jax.Array:
        return jnp.sum(state[0] * token["c"], axis=-1) + token["skipped"]

    def run(self, state: State, tokens: Token) -> tuple[State, jax.Array]:
        """Takes in N tokens by products of matrices (section 6 of the paper)."""
        [kept], dx, b, c = state, tokens["dx"], tokens["b"], tokens["c"]
        since, left = decays(tokens["g"].T)
        exactly = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        read = exactly("hij,jhp->ihp", exactly("is,js->ij", c, b) * since, dx)
        read = read + exactly("hps,is->ihp", kept, c) * left.T[..., None] + tokens["skipped"]
        kept = kept * left[:, -1, None, None] + exactly("jhp,js->hps", dx * since[:, -1].T[..., None], b)
        return (kept,), read


@dataclass(frozen=True)
class Multipliers:
    """Numbers that multiply each projected part of a layer, its input and its output (Falcon-H1)."""

    gates: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    steps: float = 1.0
    input: float = 1.0
    output: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "gates x b c steps input output")

    def of_channels(self, scan: SelectiveScan) -> np.ndarray:
        """Returns those of the channels of a group, f32[C]."""
        sizes = [scan.values, scan.state_size, scan.state_size]
        return np.repeat(np.array([self.x, self.b, self.c], np.float32), sizes)


@dataclass(frozen=True)
class Mamba2(StateMixer):
    """A layer of Mamba-2. Where groups do not divide over devices, their B and C are copied, and their heads shared."""

    scan: SelectiveScan
    conv_size: int
    norm: RmsNorm | None  # of what each group reads; None: it is only gated
    gates_last: bool = False  # the norm comes before the gates, and not after them
    multipliers: Multipliers | None = None
    has_conv_bias: bool = True
    has_bias: bool = False  # of the projections
    least_step: float = 0.0
    most_step: float = math.inf
    copies: int = 1  # parts into which the heads of each group are divided

    group_name: ClassVar[str] = "groups of Mamba-2"

    @property
    def rule(self) -> RecurrentRule:
        return RecurrentRule(self.conv, self.scan)

    @property
    def conv(self) -> CausalConv:
        return CausalConv(self.scan.channels, self.conv_size, self.has_conv_bias)

    @property
    def num_heads(self) -> int:
        return self.num_groups * self.scan.num_heads

    def problem(self, size: int) -> str | None:
        heads, copies = self.scan.num_heads, self._copies(size)
        if heads % copies:
            return f"{self.num_groups} {self.group_name} of {heads} heads do not divide over {size} devices"
        return None

    def spread(self, size: int) -> Self:
        copies = self._copies(size)
        scan = replace(self.scan, num_heads=self.scan.num_heads // copies)
        return replace(self, num_groups=self.num_groups * copies, scan=scan, copies=copies)

    def _copies(self, size: int) -> int:
        return size // math.gcd(self.num_groups, size)

    # For each group: the gates of its heads, the channels x of its heads with B and C, and the steps of its heads.

    @property
    def gates(self) -> Linear:
        return self._of_group(self.scan.values, HeadGroups(self.scan.num_heads, self.scan.head_size, 0))

    @property
    def inputs(self) -> Linear:
        return self._of_group(self.scan.channels, self._channel_heads)

    @property
    def steps(self) -> Linear:
        return self._of_group(self.scan.num_heads, HeadGroups(self.scan.num_heads, 1, 0))

    @property
    def output(self) -> Linear:
        shape = (self.hidden_size, self.num_groups * self.scan.values)
        heads = HeadGroups(self.scan.num_heads, self.scan.head_size, 0)
        return Linear(shape, ("embed", "heads"), self.has_bias, heads)

    def _of_group(self, count: int, heads: HeadGroups) -> Linear:
        shape = (self.num_groups, count, self.hidden_size)
        return Linear(shape, ("kv_heads", None, "embed"), self.has_bias, heads)

    @property
    def _channel_heads(self) -> HeadGroups:
        return HeadGroups(self.scan.num_heads, self.scan.head_size, 2 * self.scan.state_size)

    def declare(self) -> dict[str, ParamDecl]:
        K, H = self.num_groups, self.scan.num_heads
        heads = HeadGroups(H, 1, 0)
        decls = self.gates.declare("mamba_gates") | self.inputs.declare("mamba_in") | self.steps.declare("mamba_steps")
        decls |= self.output.declare("mamba_out") | self.conv.declare("mamba_taps", K, self._channel_heads)
        of_heads = ParamDecl((K, H), ("kv_heads", None), dtype="float32", heads=heads)
        decls |= {"mamba_decay": of_heads, "mamba_skip": of_heads, "mamba_dt_bias": replace(of_heads, init="zeros")}
        if self.norm is not None:
            norm = self.norm.declare("mamba_norm", (K, H, self.scan.head_size), ("kv_heads", None, None))
            decls |= {name: replace(decl, heads=heads) for name, decl in norm.items()}
        return decls

    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        by = self.multipliers
        x = x if by is None else by.input * x
        steps, channels = self.steps.apply(weights, "mamba_steps", x), self.inputs.apply(weights, "mamba_in", x)
        gates = self.gates.apply(weights, "mamba_gates", x)
        if by is not None:
            steps, gates = by.steps * steps, by.gates * gates
            channels = channels.astype(jnp.float32) * by.of_channels(self.scan)
        steps = steps.astype(jnp.float32) + weights["mamba_dt_bias"]
        dt = jnp.clip(jax.nn.softplus(steps), self.least_step, self.most_step)
        token = {
            CHANNELS: channels,
            "dt": dt,
            "g": -jnp.exp(weights["mamba_decay"]) * dt,
        }
        of_rule = self.conv.weights(weights, "mamba_taps") | {SKIP: weights["mamba_skip"]}
        read, kv = given.recur(kv, given, of_rule, token)
        gates = jax.nn.silu(gates.reshape(read.shape).astype(jnp.float32))
        if self.gates_last:
            out = self._normed(weights, read, given.axis) * gates
        else:
            out = self._normed(weights, read * gates, given.axis)
        out = self.output.apply_summed(weights, "mamba_out", out.astype(x.dtype).reshape(len(x), -1), given.axis)
        return out if by is None else by.output * out, kv

    def _normed(self, weights: Mapping[str, Any], x: jax.Array, axis: ModelAxis) -> jax.Array:
        """Returns x f32[T, K, H, P], normed over each group, whose parts may be on several devices."""
        if self.norm is None:
            return x

        def over_parts(mean: jax.Array) -> jax.Array:
            """Returns the means of the groups of which [T, K, 1, 1] are those of this device's parts."""
            if self.copies == 1:
                return mean
            T, K, _, _ = mean.shape
            group = (axis.first(K) + jnp.arange(K)) // self.copies
            sums = jnp.zeros((T, K * axis.size // self.copies, 1, 1), mean.dtype).at[:, group].add(mean)
            return axis.sum(sums)[:, group] / self.copies

        return self.norm.over(x, weights["mamba_norm"], axes=(2, 3), mean=over_parts)
