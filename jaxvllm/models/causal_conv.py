"""`CausalConv`: a short convolution of each channel with the tokens before it, whose last values a state keeps.

Layers of linear attention and state-space layers begin with one. The window is f32[size - 1, C] for C channels of one
head, the oldest token first, and zeros before the first token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import HeadGroups, ParamDecl
from jaxvllm.models.norm import bias_of
from jaxvllm.models.positive import require_positive
from pallas_kernels.ragged_paged_attention import RaggedRows


@dataclass(frozen=True)
class CausalConv:
    """The convolution of one head. All of it is in float32."""

    channels: int  # of one head, C
    size: int  # tokens that it sees, the present one included
    has_bias: bool = False
    has_activation: bool = True  # SiLU

    def __post_init__(self) -> None:
        require_positive(self, "channels size")
        if self.size < 2:
            raise ValueError(f"a convolution must see at least 2 tokens, not {self.size}: otherwise it keeps no state")

    @property
    def window(self) -> tuple[int, int]:
        """The shape of what a state keeps."""
        return self.size - 1, self.channels

    def declare(self, name: str, num_heads: int, heads: HeadGroups | None = None) -> dict[str, ParamDecl]:
        """Returns its arrays for `num_heads` heads. `heads` is the layout of their channels, where they are copied."""
        shape, axes = (num_heads, self.channels), ("kv_heads", None)
        decls = {name: ParamDecl((*shape, self.size), (*axes, None), heads=heads)}
        return decls | ({bias_of(name): ParamDecl(shape, axes, "zeros", heads=heads)} if self.has_bias else {})

    def weights(self, weights: Mapping[str, Any], name: str) -> dict[str, jax.Array]:
        """Returns what `take` and `take_run` need of the arrays that are declared under that name, with all heads."""
        taps = {"taps": jnp.swapaxes(weights[name], -1, -2).astype(jnp.float32)}
        return taps | ({"bias": weights[bias_of(name)].astype(jnp.float32)} if self.has_bias else {})

    def take(self, weights: Mapping[str, jax.Array], window: jax.Array, channels: jax.Array) -> jax.Array:
        """Returns what becomes of a token's channels, f32[C], after the tokens of the window."""
        seen = jnp.concatenate([window, channels[None]])
        return self._finished(weights, jnp.sum(seen * weights["taps"], axis=0))

    def take_run(self, weights: Mapping[str, jax.Array], window: jax.Array, channels: jax.Array) -> jax.Array:
        """Returns what becomes of the channels of tokens that follow each other, f32[N, C]."""
        N, every = len(channels), jnp.concatenate([window, channels])
        seen = jnp.stack([every[i : i + N] for i in range(self.size)], axis=1)
        return self._finished(weights, jnp.sum(seen * weights["taps"], axis=1))

    def seen_in(self, rows: RaggedRows, windows: jax.Array, channels: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the channels that `tokens` i32[N] of a step see, f32[N, size, K, C], the oldest first.

        channels f32[T, K, C] are those of all tokens, and windows f32[R, K, size - 1, C] those before the rows' tokens.
        """
        row, before = rows.token_rows[tokens], jnp.arange(self.size - 1, -1, -1)
        in_row = (tokens - rows.query_starts[row])[:, None]
        of_step = jnp.take(channels, tokens[:, None] - before, axis=0, mode="clip")
        oldest = jnp.clip(in_row - before + self.size - 1, 0, self.size - 2)
        of_window = jnp.moveaxis(windows, 2, 1)[row[:, None], oldest]
        return jnp.where((before <= in_row)[..., None, None], of_step, of_window)

    def take_seen(self, weights: Mapping[str, jax.Array], seen: jax.Array) -> jax.Array:
        """Returns what becomes of tokens that see `seen` f32[N, size, K, C]: f32[N, K, C]."""
        return self._finished(weights, jnp.sum(seen * jnp.swapaxes(weights["taps"], 0, 1), axis=1))

    def after(self, window: jax.Array, channels: jax.Array) -> jax.Array:
        """Returns the window after a token."""
        return jnp.concatenate([window[1:], channels[None]])

    def after_run(self, window: jax.Array, channels: jax.Array, count: jax.Array) -> jax.Array:
        """Returns the window after the first `count` of these tokens."""
        return jax.lax.dynamic_slice_in_dim(jnp.concatenate([window, channels]), count, self.size - 1)

    def _finished(self, weights: Mapping[str, jax.Array], sums: jax.Array) -> jax.Array:
        sums = sums + weights["bias"] if self.has_bias else sums
        return jax.nn.silu(sums) if self.has_activation else sums
