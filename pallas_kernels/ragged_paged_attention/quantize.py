"""Keys and values in eight bits: how pages hold their codes, and the scales by which codes are multiplied."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend

Codes = Literal["int8", "float8_e4m3fn", "float8_e5m2"]
# The backends in plain XLA or for CPUs hold float8 as bytes. XLA:CPU scatters float8 as float16, which takes twice the
# pool in temporaries (34 MB for a pool of 17; none as bytes), and a bitcast of the whole pool is one copy of it.
_HOLD_BYTES = ("reference", "cpu")
# A key or value without a larger number counts as zeros, so that its scale is no denormal number, nor a divisor of 0.
_LEAST = 1e-30


def largest_code(codes: DTypeLike) -> float:
    """Returns the largest number that a code of this dtype stands for, before scales."""
    return 127.0 if jnp.dtype(codes) == jnp.int8 else float(jnp.finfo(codes).max)


@dataclass(frozen=True)
class KVQuantization:
    """Keys and values are codes in eight bits, each multiplied by a scale: one for a head, or one for each token of it.

    The scales of heads are given with every call. The scales of tokens lie beside the pages. Each
    depends on nothing but one key or value.
    """

    codes: Codes
    by_token: bool = False

    @property
    def largest(self) -> float:
        """The largest code."""
        return largest_code(self.codes)

    @property
    def needs_scales(self) -> bool:
        """Whether its codes say nothing without the scales of a calibration: integers of which no token has a scale."""
        return self.codes == "int8" and not self.by_token

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scale, a float32, that each key or value of a token has of its own."""
        return 4 if self.by_token else 0

    def held_in(self, backend: Backend) -> jnp.dtype:
        """Returns the dtype of the pages of `backend`."""
        as_bytes = self.codes != "int8" and backend.kind in _HOLD_BYTES
        return jnp.dtype(jnp.uint8 if as_bytes else self.codes)

    def token_scales(self, x: jax.Array) -> jax.Array:
        """Returns the scale f32[T, K] of each of x f[T, K, D], by which its largest number becomes the largest code."""
        most = jnp.abs(x.astype(jnp.float32)).max(axis=-1)
        # XLA multiplies by the reciprocal of a constant divisor anyhow. Said so, any program gives the same bits. A NaN
        # stays one.
        return jnp.where(most < _LEAST, 1, most * (1 / self.largest))

    def encoded(self, x: jax.Array, scales: jax.Array, held: DTypeLike) -> jax.Array:
        """Divides x f[T, K, D] by scales f32[K] or f32[T, K], and rounds to the nearest code.

        Larger numbers become the largest code: `float8_e4m3fn` has no infinity, so that one outlier would be a NaN in
        the cache.
        """
        # XLA multiplies by the reciprocal in some programs and divides in others, which rounds ties to other codes.
        y = jnp.clip(x.astype(jnp.float32) * (1 / scales)[..., None], -self.largest, self.largest)
        return _as(jnp.round(y).astype(jnp.int8) if self.codes == "int8" else y.astype(self.codes), held)

    def decoded(self, held: jax.Array, dtype: DTypeLike, scales: jax.Array | None = None) -> jax.Array:
        """Returns the codes of a part of pages as numbers, multiplied by the `scales` of tokens f32[..] if given."""
        numbers = _as(held, self.codes)
        if scales is None:
            return numbers.astype(dtype)
        return (numbers.astype(jnp.float32) * scales[..., None]).astype(dtype)


def _as(codes: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the same bytes in another dtype. A part of the pages is read so, and never all of them."""
    return codes if codes.dtype == dtype else lax.bitcast_convert_type(codes, jnp.dtype(dtype))
