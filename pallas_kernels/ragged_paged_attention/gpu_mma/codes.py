"""Codes of eight bits as numbers of 16 bits, by what each generation of GPUs converts."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chips import GpuChip

FLOAT8 = (8, 9)  # the compute capability of the first GPUs that convert float8
# The exponents of float16 are biased by eight more than those of e4m3.
E4M3_SHIFT = 2.0**8


def converts_float8(chip: GpuChip) -> bool:
    """Returns whether the chip has instructions for float8."""
    return chip.compute_capability >= FLOAT8


def decoded(codes: jax.Array, dtype: jnp.dtype, has_float8: bool) -> jax.Array:
    """Returns codes in int8 or float8 as numbers of `dtype`, bfloat16 or float16, exactly."""
    # Every code is a float16, and there is no shorter way to bfloat16: GPUs before Hopper convert none to it.
    is_float8 = jnp.issubdtype(codes.dtype, jnp.floating)
    numbers = _float8_by_bits(codes) if is_float8 and not has_float8 else codes.astype(jnp.float16)
    return numbers if dtype == jnp.float16 else numbers.astype(jnp.float32).astype(dtype)


def _float8_by_bits(codes: jax.Array) -> jax.Array:
    """Returns float8 as float16, by integers: e5m2 is its upper half, and e4m3 has one bit of fraction more."""
    bits = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16)  # with copies of the sign on the left
    if codes.dtype == jnp.float8_e5m2:
        return lax.bitcast_convert_type(bits << 8, jnp.float16)
    magnitude = bits & 0x7F
    # All ones is NaN, and would become 480.
    numbers = lax.bitcast_convert_type((magnitude << 7) | (bits & -0x8000), jnp.float16) * jnp.float16(E4M3_SHIFT)
    return jnp.where(magnitude == 0x7F, jnp.float16(jnp.nan), numbers)
