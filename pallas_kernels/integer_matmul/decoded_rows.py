"""Decodes some rows of a matrix in panels of codes, in plain XLA."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.integer_matmul.code_panels import (
    CODES,
    FACTORS,
    HIGH,
    MIN_FACTORS,
    MINS,
    SCALES,
    ZEROS,
    CodePanels,
)
from pallas_kernels.quantized_matmul.code import E4M3


def decoded_rows(panels: CodePanels, arrays: Mapping[str, jax.Array], numbers: jax.Array, ins: int) -> jax.Array:
    """Returns the rows i32[T] of a matrix [out, ins] that the arrays are, f32[T, ins]. Each element is rounded once.

    A number out of range is not detected.
    """
    panel, column = numbers // panels.columns, numbers % panels.columns

    def of_rows(name: str) -> jax.Array:
        return arrays[name].at[panel, :, column].get(mode="promise_in_bounds")

    def of_inputs(name: str, dtype: DTypeLike | None = None) -> jax.Array:
        found = of_rows(name)
        found = found if dtype is None else jax.lax.bitcast_convert_type(found, dtype)
        return found.astype(jnp.float32)

    def spread(values: jax.Array, group: int | None) -> jax.Array:
        return jnp.repeat(values, group or ins, axis=1)[:, :ins]

    codes = of_rows(CODES)
    if panels.bits < 8:
        codes = jnp.stack([codes & 15, codes >> np.uint8(4)], axis=2)
    codes = codes.reshape(len(numbers), -1)[:, :ins]
    if panels.bits in (5, 6):
        bits, words = panels.bits - 4, of_rows(HIGH)
        high = [words >> np.uint8(first) & np.uint8(2**bits - 1) for first in range(0, 8, bits)]
        codes |= jnp.stack(high, axis=2).reshape(len(numbers), -1)[:, :ins] << np.uint8(4)
    if panels.looked_up is not None:
        exact = jnp.asarray(panels.looked_up.table)[codes]
    elif panels.is_float8:
        exact = jax.lax.bitcast_convert_type(codes, E4M3.dtype).astype(jnp.float32)
    elif panels.offsets == "zeros":
        exact = codes.astype(jnp.float32) - spread(of_inputs(ZEROS), panels.group)
    else:
        exact = codes.astype(jnp.float32) - panels.zero
    scales = of_inputs(SCALES, panels.scale_dtype)
    if panels.span is not None:
        factors = of_inputs(FACTORS)
        scales *= jnp.repeat(factors, panels.span // (panels.group or ins), axis=1)[:, : scales.shape[1]]
    exact *= spread(scales, panels.group)
    if panels.offsets == "mins":
        least = spread(of_inputs(MINS), panels.group)
        exact -= least if panels.span is None else least * spread(of_inputs(MIN_FACTORS), panels.span)
    return exact
