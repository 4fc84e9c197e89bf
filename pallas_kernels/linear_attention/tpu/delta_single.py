"""The delta rule for single tokens: one pass over the state of a row, which is read, updated and written.

It is done by vectors. For 16 key heads with two matrices each, of 128 by 128, a page has 2.1 MiB, and moving it takes
longer than the operations on it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.length import of_length_one
from pallas_kernels.linear_attention.tpu.blocks import SIZE, StateBlocks
from pallas_kernels.linear_attention.tpu.calls import call_singles
from pallas_kernels.linear_attention.tpu.tokens import LANES, DeltaTokens
from pallas_kernels.linear_attention.visits import SingleVisits


def take_singles(
    pages: jax.Array,
    place: jax.Array | int,
    visits: SingleVisits,
    tokens: DeltaTokens,
    *,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of `visits`, and returns what is read after each, f32[T, K, r * 128], and the pages.

    What is read for other tokens is arbitrary.
    """
    taps, channels, g, beta = tokens
    num_tokens, num_heads, _ = channels.shape
    r = beta.shape[-1]
    return call_singles(
        partial(_single, values_per_key=r, decays=g.shape[-1]),
        taps.swapaxes(0, 1),
        [channels, jnp.concatenate([g.reshape(num_tokens, num_heads, -1), beta], axis=-1)],
        (r * SIZE,),
        pages,
        place,
        visits,
        heads=blocks.single,
        head_axis=1,
        chip=chip,
        interpret=interpret,
        name="delta_rule_single",
    )


def _single(
    goes_on: jax.Array,
    taps: Any,  # [W, heads, C]
    x: Any,  # [heads, C]
    gates: Any,  # [heads, r * G + r]
    before: Any,  # [heads, S, 128]
    out: Any,  # [heads, r * 128]
    after: Any,  # [heads, S, 128]
    *,
    values_per_key: int,
    decays: int,
) -> None:
    heads, num_channels = x.shape
    r, parts, size = values_per_key, num_channels // SIZE, taps.shape[0]

    def kept(state: jax.Array) -> jax.Array:
        return jnp.where(goes_on, state, 0.0)  # a page that was free may have NaN

    mixed = []
    for part in range(parts):
        lanes = slice(part * SIZE, (part + 1) * SIZE)
        ages = [r * SIZE + age * parts + part for age in range(size - 1)]
        seen = [kept(before[:, row, :]) for row in ages] + [x[:, lanes].astype(jnp.float32)]
        for row, value in zip(ages, seen[1:], strict=True):
            after[:, row, :] = value
        mixed.append(jax.nn.silu(sum(taps[age, :, lanes] * value for age, value in enumerate(seen))))
    end = r * SIZE + (size - 1) * parts
    if end < after.shape[1]:
        after[:, end:, :] = jnp.zeros((heads, after.shape[1] - end, SIZE), jnp.float32)
    q, k, *v = mixed
    q, k = of_length_one(q) * SIZE**-0.5, of_length_one(k)
    qk = jnp.sum(q * k, axis=-1, keepdims=True)
    beta = gates[:, r * decays :]
    left = [jnp.exp(gates[:, value * decays : (value + 1) * decays]) for value in range(r)]
    # A column for each query, key and decay, by which the rows of a matrix are multiplied.
    used = jnp.concatenate([q, k, *(left if decays == SIZE else [])])
    turned = jnp.concatenate([used, jnp.zeros((-len(used) % LANES, SIZE), jnp.float32)]).T
    for head in range(heads):
        own = slice(head, head + 1)
        q_column, k_column, *left_columns = (turned[:, at : at + 1] for at in range(head, len(used), heads))
        for value in range(r):
            rows = slice(value * SIZE, (value + 1) * SIZE)
            decay = left_columns[value] if decays == SIZE else left[value][own]
            matrix = kept(before[head, rows, :]) * decay
            said = jnp.sum(matrix * k_column, axis=0, keepdims=True)
            read = jnp.sum(matrix * q_column, axis=0, keepdims=True)
            error = beta[own, value : value + 1] * (v[value][own] - said)
            out[own, rows] = read + qk[own] * error
            after[head, rows, :] = matrix + k_column * error
