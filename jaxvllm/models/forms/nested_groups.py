"""Nested groups: elements of a row share a scale and perhaps a minimum, and some of these groups share a factor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, StoredAs, largest_of, of_groups, packed
from jaxvllm.models.forms.form import Arrays
from jaxvllm.models.forms.scaled_groups import CODES, SCALES, ScaledGroups
from jaxvllm.models.tiling import Fill
from pallas_kernels.integer_matmul.code_panels import FACTORS, HIGH, MIN_FACTORS, MINS
from sharding.rules import MODEL, partition_spec

_UNIT = 8  # inputs whose highest bits are a byte
_LARGEST = 127  # of scales that have a factor


@dataclass(frozen=True)
class NestedGroups(ScaledGroups):
    """A matrix [.., in] is codes * scales - mins, or (codes - zero) * scales, as GGUF files have it.

    Scales and mins are i8 [.., in / group], each times a factor f16 [.., in / span], or floats. Codes have four to six
    bits. The lower four of two codes are a byte of one array, and the upper ones of four or eight codes one of
    another. XLA multiplies as it does for `ScaledGroups`, and reads the same numbers.

    group: a multiple of 8
    span: how many elements have one factor of scales, and one of mins, at most; None: scales and mins are floats
    has_mins: whether there are mins. Without them the code's own number stands for 0
    """

    span: int | None = None
    has_mins: bool = False

    @classmethod
    def of(cls, stored: StoredAs, group: int | None, shards: int = 1) -> Self | None:
        """Returns the form of what is stored so, with groups of at most that size, or None where it has none."""
        if group is None or group % _UNIT:
            return None
        return cls(stored.code, group, stored.scale_dtype, False, shards, stored.span, stored.has_mins)

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        *out, size = matrix.shape
        group, span = self._groups(size // (self.shards if MODEL in partition_spec(matrix.axes[-1:]) else 1))

        def array(per_element: int, dtype: str) -> ParamDecl:
            return ParamDecl((*out, size // per_element), matrix.axes, "ones", dtype=dtype, chosen=matrix.chosen)

        codes = replace(matrix, shape=(*out, size // 2), dtype="uint8", per_element=2, heads=None)
        found = {CODES: codes} | ({HIGH: array(8 // self._high_bits, "uint8")} if self._high_bits else {})
        for name, above in ((SCALES, FACTORS), (MINS, MIN_FACTORS)):
            if name == SCALES or self.has_mins:
                found[name] = array(group, self.scale_dtype)
                if span is not None:
                    found[above] = array(span, "float16")
        return found

    @property
    def _high_bits(self) -> int:
        """The bits of a code that are in an array of their own."""
        return self.code.bits - 4

    @property
    def _zero(self) -> int:
        return 0 if self.has_mins else self.code.zero

    def _groups(self, inputs: int) -> tuple[int, int | None]:
        """Returns how many of the elements that a device has of a row share a scale, and a factor."""
        return self._group(inputs), None if self.span is None else math.gcd(self.span, inputs)

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        sizes = {name: matrix.shape[-1] // decl.shape[-1] for name, decl in self.declare(matrix).items()}
        values = {
            SCALES: elements.scales,
            MINS: elements.mins,
            FACTORS: elements.factors,
            MIN_FACTORS: elements.min_factors,
        }
        found = {name: of_groups(fill, sizes[name]) for name, fill in values.items() if name in sizes}
        if self._high_bits:
            found[HIGH] = packed(elements.codes, sizes[HIGH], first_bit=4)
        return found | {CODES: packed(elements.codes, 2)}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        *out, size = matrix.shape
        inputs = shardings[CODES].shard_shape((*out, size // 2))[-1] * 2  # of each device
        # jax knows a function again that lives as long as its module.
        kept: dict[str, jax.Array] = jax.jit(_rounded, static_argnums=(0, 2), out_shardings=dict(shardings))(
            self, matrix, inputs
        )
        return kept

    def nearest(self, matrix: jax.Array, inputs: int) -> dict[str, jax.Array]:
        """Returns the arrays of a matrix of which each device has so many inputs, rounded to the nearest numbers.

        Codes are u8 [.., in], one in each byte. A NaN makes all NaN that shares its scale, or its factor.
        """
        group, span = self._groups(inputs)
        by_group = matrix.astype(jnp.float32).reshape(*matrix.shape[:-1], -1, group)
        sizes = largest_of(by_group)
        lowest = jnp.where(jnp.isnan(sizes), sizes, jnp.minimum(by_group.min(axis=-1), 0))
        made: dict[str, jax.Array] = {}

        def held(name: str, above: str, exact: jax.Array) -> jax.Array:
            """Keeps numbers f32 [.., groups], and returns those that are kept."""
            if span is None:
                made[name] = exact.astype(self.scale_dtype)
                return made[name].astype(jnp.float32)
            parts = exact.reshape(*exact.shape[:-1], -1, span // group)
            largest = largest_of(parts)
            made[above] = jnp.where(largest == 0, 1, largest / _LARGEST).astype(jnp.float16)
            unit = jnp.maximum(made[above].astype(jnp.float32), np.float32(2.0**-24))[..., None]
            made[name] = jnp.clip(jnp.round(parts / unit), 0, _LARGEST).astype(self.scale_dtype).reshape(exact.shape)
            return (made[name].astype(jnp.float32).reshape(parts.shape) * unit).reshape(exact.shape)

        if self.has_mins:
            mins = held(MINS, MIN_FACTORS, -lowest)[..., None]
            scales = held(SCALES, FACTORS, (by_group.max(axis=-1) - lowest) / (2**self.code.bits - 1))[..., None]
            codes = jnp.round((by_group + mins) / jnp.where(scales > 0, scales, 1))
        else:
            scales = held(SCALES, FACTORS, sizes / self.code.largest)[..., None]
            units = by_group / jnp.where(scales > 0, scales, 1)
            is_looked_up = self.code.number_table is not None
            codes = self.code.nearest_codes(units) if is_looked_up else jnp.round(units) + self._zero
        whole = jnp.clip(codes, 0, 2**self.code.bits - 1).astype(jnp.uint8)
        return made | {CODES: whole.reshape(matrix.shape)}

    def in_bytes(self, arrays: Arrays) -> dict[str, jax.Array]:
        """Returns the arrays of a matrix, of which `arrays` have one code in each byte."""
        codes = arrays[CODES]
        high = {HIGH: _in_bytes(codes >> 4, self._high_bits)} if self._high_bits else {}
        return {**arrays, **high, CODES: _in_bytes(codes & 15, 4)}

    def _decoded(self, rows: Arrays, dtype: DTypeLike) -> jax.Array:
        codes = _of_bytes(rows[CODES], 4)
        if self._high_bits:
            codes |= _of_bytes(rows[HIGH], self._high_bits) << 4

        def values(name: str, above: str) -> jax.Array:
            exact = rows[name].astype(jnp.float32)
            if above in rows:
                parts = exact.reshape(*rows[above].shape, -1) * rows[above].astype(jnp.float32)[..., None]
                exact = parts.reshape(exact.shape)
            return exact[..., None]

        # All products are exact, so that nothing depends on what XLA makes one instruction of.
        by_group = self.code.numbers_of_codes(codes.reshape(*rows[SCALES].shape, -1)) - self._zero
        exact = by_group * values(SCALES, FACTORS)
        if self.has_mins:
            exact -= values(MINS, MIN_FACTORS)
        return exact.reshape(codes.shape).astype(dtype)


def _rounded(form: NestedGroups, matrix: jax.Array, inputs: int) -> dict[str, jax.Array]:
    return form.in_bytes(form.nearest(matrix, inputs))


def _in_bytes(numbers: jax.Array, bits: int) -> jax.Array:
    """Returns bytes of as many numbers u8 [.., in] as they have room for, the first in the lowest bits."""
    count = 8 // bits
    parts = numbers.reshape(*numbers.shape[:-1], -1, count) << jnp.arange(0, 8, bits, dtype=jnp.uint8)
    return jnp.sum(parts, axis=-1, dtype=jnp.uint8)


def _of_bytes(array: jax.Array, bits: int) -> jax.Array:
    """Returns the numbers u8 [.., in] that bytes hold so."""
    parts = [array >> np.uint8(first) & np.uint8(2**bits - 1) for first in range(0, 8, bits)]
    return jnp.stack(parts, axis=-1).reshape(*array.shape[:-1], -1)
