"""Groups with a scale: the elements of a row share one scale, and perhaps a zero, with some beside them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.few_bits import Elements, FewBits, as_dtype, at_least, largest_of, of_groups, packed
from jaxvllm.models.forms.form import Arrays
from jaxvllm.models.forms.plain import xla_product
from jaxvllm.models.tiling import Fill
from pallas_kernels.quantized_matmul import decoded
from pallas_kernels.quantized_matmul.code import Code
from sharding.rules import MODEL, partition_spec

CODES, SCALES, ZEROS = "codes", "scales", "zeros"
# XLA decodes so many elements of a matrix at a time: 1 MiB of float32 stays in the cache of a core.
_TILE = 1 << 18


@dataclass(frozen=True)
class ScaledGroups(FewBits):
    """A matrix [.., in] is (codes - zeros) * scales, with scales and zeros [.., in / group], and codes of few bits.

    Blocks of several rows are groups of each of their rows. Where a device has a part of each row, groups are so small
    that its part consists of whole ones. Activations stay as they are. XLA multiplies by some rows of the matrix at a
    time, which it decodes in the dtype of the activations, so that there is never more of it than these.

    group: how many elements have one scale, at most; None: all that a device has of a row
    shards: the devices that share rows out, where rows are divided
    has_zeros: whether there are zeros. Without them they are the number that stands for 0 in all such matrices
    """

    code: Code
    group: int | None
    scale_dtype: str
    has_zeros: bool = False
    shards: int = 1

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        *out, size = matrix.shape
        shards = self.shards if MODEL in partition_spec(matrix.axes[-1:]) else 1
        group = self._group(size // shards)
        if group % self.code.per_byte:
            raise ValueError(
                "numbers of four bits lie in pairs, so each device must have an even number of the inputs of a matrix, "
                f"not {size // shards}: use int8 or fp8, or a smaller mesh"
            )
        per_byte = self.code.per_byte
        options: dict[str, Any] = {"dtype": held_dtype(self.scale_dtype), "chosen": matrix.chosen}
        scales = ParamDecl((*out, size // group), matrix.axes, "ones", **options)
        codes = replace(
            matrix, shape=(*out, size // per_byte), dtype=held_dtype(self.code.dtype), per_element=per_byte, heads=None
        )
        return {CODES: codes, SCALES: scales} | self._zeros(scales)

    def _group(self, inputs: int) -> int:
        """Returns how many of the elements that a device has of a row share a scale."""
        return inputs if self.group is None else math.gcd(self.group, inputs)

    def _zeros(self, scales: ParamDecl) -> dict[str, ParamDecl]:
        return {ZEROS: replace(scales, init="zeros", dtype=self.code.dtype)} if self.has_zeros else {}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        *out, size = matrix.shape
        per_byte = self.code.per_byte
        inputs = shardings[CODES].shard_shape((*out, size // per_byte))[-1] * per_byte  # of each device
        # jax knows a function again that lives as long as its module: a model has thousands of experts.
        rounded = jax.jit(_rounded, static_argnums=(0, 2), out_shardings=dict(shardings))
        kept: dict[str, jax.Array] = rounded(self, matrix, self._group(inputs))
        return kept

    def rounded(self, matrix: jax.Array, group: int) -> dict[str, jax.Array]:
        """Returns the arrays of a matrix that is rounded to groups of exactly that size."""
        by_group = matrix.astype(jnp.float32).reshape(*matrix.shape[:-1], -1, group)
        largest = largest_of(by_group)
        # As in `rounded_by_row`: no scale is less than the normal numbers, and that of a NaN is NaN.
        exact = jnp.maximum(largest * np.float32(1 / self.code.largest), np.finfo(np.float32).tiny)
        scales = self._scales(jnp.where(largest == 0, 1.0 if self.code.has_zero else 0.0, exact))
        codes = self.code.rounded(by_group / _bits(scales, self.scale_dtype).astype(jnp.float32)[..., None])
        made = {
            CODES: _bits(codes.reshape(*matrix.shape[:-1], -1), held_dtype(self.code.dtype)),
            SCALES: scales,
        }
        zeros = jnp.full(scales.shape, self.code.zero, self.code.dtype)
        return made | ({ZEROS: zeros} if self.has_zeros else {})

    def _scales(self, exact: jax.Array) -> jax.Array:
        """Returns the scales nearest to these f32, or where they are powers of two, the nearest that are not below."""
        if self.scale_dtype != "float8_e8m0fnu":
            return _bits(exact.astype(self.scale_dtype), held_dtype(self.scale_dtype))
        # The exponent of a float is that of the power of two below it, and is all that is stored of a power.
        exponents = (jax.lax.bitcast_convert_type(exact, jnp.uint32) + np.uint32(2**23 - 1)) >> np.uint32(23)
        return exponents.astype(jnp.uint8)

    def fills(self, matrix: ParamDecl, elements: Elements) -> Mapping[str, Fill]:
        group = matrix.shape[-1] // self.declare(matrix)[SCALES].shape[-1]
        scales = elements.scales
        if self.scale_dtype == "float8_e8m0fnu":  # it has no zero, which would become NaN
            scales = at_least(scales, 2.0**-127)
        found = {
            CODES: as_dtype(packed(elements.codes, self.code.per_byte), self.code.dtype),
            SCALES: as_dtype(of_groups(scales, group), self.scale_dtype),
        }
        return found | ({ZEROS: of_groups(elements.zeros, group)} if self.has_zeros else {})

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        out = arrays[CODES].shape[:-1]
        return self._rows(x, arrays, 0, math.prod(out), dtype).reshape(len(x), *out)

    def product_in_stack(
        self, x: jax.Array, stack: Arrays, number: jax.Array | int, dtype: DTypeLike | None = None
    ) -> jax.Array:
        # The rows of one matrix are read where they are: a slice of the stack would be copied.
        out = stack[CODES].shape[1:-1]
        count = math.prod(out)
        return self._rows(x, stack, number * count, count, dtype).reshape(len(x), *out)

    def _rows(
        self, x: jax.Array, arrays: Arrays, first: jax.Array | int, count: int, dtype: DTypeLike | None
    ) -> jax.Array:
        """Multiplies x [T, in] by rows `first` and on of all that the arrays have: [T, count]."""
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()}
        rows = min(count, max(1, _TILE // x.shape[-1]))

        def product(at: jax.Array | int) -> jax.Array:
            tile = {name: jax.lax.dynamic_slice_in_dim(array, first + at, rows) for name, array in flat.items()}
            return xla_product(x, self._decoded(tile, x.dtype), dtype)

        if rows == count:
            return product(0)

        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            at = jnp.minimum(i * rows, count - rows)  # the last tile has some rows of the one before it
            return jax.lax.dynamic_update_slice_in_dim(y, product(at), at, 1)

        y = jnp.zeros((len(x), count), x.dtype if dtype is None else dtype)
        result: jax.Array = jax.lax.fori_loop(0, -(-count // rows), step, y)
        return result

    def _decoded(self, rows: Arrays, dtype: DTypeLike) -> jax.Array:
        """Returns the values of some rows [R, in], rounded once."""
        codes, scales = _bits(rows[CODES], self.code.dtype), _bits(rows[SCALES], self.scale_dtype)
        return decoded(self.code, codes, scales, rows.get(ZEROS)).astype(dtype)


def _rounded(form: ScaledGroups, matrix: jax.Array, group: int) -> dict[str, jax.Array]:
    return form.rounded(matrix, group)


def held_dtype(dtype: str) -> str:
    """Returns the dtype of arrays that hold these bits.

    XLA:CPU converts a whole array of float8 to float16 before it takes a slice of it, and of bytes it does not: a
    product of one row with 4096 x 4096 in FP8 took 33 MiB of temporaries and 160 ms, and now takes 1 MiB and 6 ms.
    """
    return "uint8" if dtype.startswith("float8") else dtype


def _bits(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the bits of `array` as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(array, dtype)
