"""The convolution, and products in float32, for kernels that take the tokens of a tile which belong to one row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.linear_attention.tpu.blocks import SUBLANES
from pallas_kernels.linear_attention.tpu.tokens import LANES


def convolved(
    weights: Any, size: int, x: Any, state: Any, head: int, part: int, parts: int, first: int, low: Any, high: Any
) -> jax.Array:
    """Returns what the convolution makes of a part of the channels, f32[N, 128], and moves its window on.

    weights  # f32[heads, .., C]: of each head, the first `size` rows are the taps of the convolution
    x  # [N, heads * parts * 128]
    state  # f32[heads, S, 128]: the window is in rows `first` and after, an age and then a part after the other

    The visit's tokens are `low` to before `high`.
    """
    num_tokens, lanes = x.shape[0], slice(part * LANES, (part + 1) * LANES)
    channels = x[:, (head * parts + part) * LANES : (head * parts + part + 1) * LANES].astype(jnp.float32)
    ages = [state[head, row : row + 1, :] for row in range(first + part, first + (size - 1) * parts, parts)]
    unused = jnp.zeros((SUBLANES + 1 - size, LANES), jnp.float32)
    # The window stands just before the first token.
    window = jnp.concatenate([unused, *ages, jnp.zeros((num_tokens, LANES), jnp.float32)])
    seen = jnp.concatenate([jnp.zeros((SUBLANES, LANES), jnp.float32), channels])
    number = jax.lax.broadcasted_iota(jnp.int32, (len(seen), 1), 0)
    # Mosaic also rotates rows that end within a register: 41, of a step of 33 tokens, compile for v5e, v6e and v7x.
    seen = jnp.where(number >= SUBLANES + low, seen, pltpu.roll(window, low, 0))
    begins = range(SUBLANES + 1 - size, SUBLANES + 1)
    mixed = [weights[head, age : age + 1, lanes] * seen[begin : begin + num_tokens] for age, begin in enumerate(begins)]
    after = pltpu.roll(seen, len(seen) - high, 0)
    for age, begin in enumerate(begins[:-1]):
        row = first + age * parts + part
        state[head, row : row + 1, :] = after[begin : begin + 1]
    return sum(mixed[1:], mixed[0])


def product(x: jax.Array, y: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the product of two matrices, with these axes contracted."""
    dimensions = (contracted[:1], contracted[1:]), ((), ())
    return jax.lax.dot_general(
        x, y, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
