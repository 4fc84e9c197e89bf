"""`BlockType`: the types of ggml, whose rows are blocks of quantized numbers, and how blocks are decoded.

XLA decodes the blocks of the usual types on the host's CPU, in a tenth of the time that the package `gguf` takes in
NumPy. That package knows all types, and is imported only where a file has others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.extras import install_command

# The types that are not quantized, by their numbers in ggml.
_PLAIN: Mapping[int, np.dtype] = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_SIGNS = 41  # Q1_0, of which the package gguf knows the name alone
_MOST = 1 << 18  # numbers that NumPy decodes at a time: what this takes stays in the cache of a core
# Numbers that XLA decodes in a call, always as many, so that there is one program for a type. With a quarter of it a
# load of Qwen3 0.6B took 1.0 s and not 0.65 (user time), and with twice as many 0.8.
_CALL = 1 << 20


@dataclass(frozen=True)
class BlockType:
    """A type of ggml, whose rows are blocks of `count` numbers in `size` bytes each."""

    count: int
    size: int
    decode: Callable[[np.ndarray, DTypeLike], np.ndarray]  # of u8[rows, bytes], a new array [rows, numbers]

    @classmethod
    def of(cls, kind: int, where: str) -> "BlockType":
        """Returns the type of that number. Raises ValueError if it is not known, or has no weights."""
        if kind in _PLAIN:
            plain = _PLAIN[kind]
            return cls(1, plain.itemsize, lambda data, dtype: data.view(plain).astype(dtype))
        if kind == _SIGNS:
            return cls(128, 18, _decoded_signs)
        if (usual := _USUAL.get(kind)) is not None and _has_host():
            return cls(usual.count, usual.size, lambda data, dtype: _decoded_by_xla(data, usual, dtype))
        gguf = _gguf(where)
        try:
            own = gguf.GGMLQuantizationType(kind)
            count, size = gguf.GGML_QUANT_SIZES[own]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{where} has the type {kind} of ggml, which the package gguf does not know") from error

        # This class decodes the blocks of one type. `gguf.quants.dequantize` gives it 16 rows at a time, and takes five
        # times as long (Q4_K: 9.7 ms for a million numbers, and 1.7).
        decoder = getattr(gguf.quants, own.name, None)
        if decoder is None:
            raise ValueError(f"{where} has the type {own.name}, in which no weights are published")
        decoder.init_grid()

        def decode(data: np.ndarray, dtype: DTypeLike) -> np.ndarray:
            values = np.empty((len(data), data.shape[1] // size * count), dtype)
            rows = max(1, _MOST // values.shape[1])
            with np.errstate(all="ignore"):  # a scale in half precision may be infinite, if a file says so
                for first in range(0, len(data), rows):
                    values[first : first + rows] = decoder.dequantize_rows(data[first : first + rows])
            return values

        return cls(count, size, decode)


def _decoded_signs(data: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns the numbers of blocks that have a scale in half precision and a bit for each number: 1 is +, 0 is -."""
    blocks = data.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(dtype)
    is_plus = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(bool)
    return np.where(is_plus, scales, -scales).reshape(len(data), -1)


def _gguf(where: str) -> Any:
    try:
        import gguf.quants
    except ImportError as error:
        raise NotImplementedError(
            f"{where} is quantized, and decoding it needs a package that is not here: {install_command('gguf')}"
        ) from error
    return gguf


def _has_host() -> bool:
    """Returns whether JAX_PLATFORMS leaves a device that computes on the host. None is looked for: plans need none."""
    platforms = jax.config.jax_platforms
    return not platforms or "cpu" in platforms.split(",")


@dataclass(frozen=True)
class _Usual:
    """A type that XLA decodes.

    parts: makes parts f32[blocks, a, b, c] of u8[blocks, size], which follow each other along b
    """

    count: int
    size: int
    parts: Callable[[jax.Array], list[jax.Array]]


def _decoded_by_xla(data: np.ndarray, usual: _Usual, dtype: DTypeLike) -> np.ndarray:
    blocks = data.reshape(-1, usual.size)
    values = np.empty((len(blocks), usual.count), dtype)
    most = _CALL // usual.count
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for first in range(0, len(blocks), most):
            part = blocks[first : first + most]
            if (count := len(part)) < most:
                part = np.pad(part, ((0, most - count), (0, 0)))
            values[first : first + count] = np.asarray(_values(part, usual, values.dtype.name))[:count]
    return values.reshape(len(data), -1)


def _rounded(blocks: jax.Array, usual: _Usual, dtype: str) -> jax.Array:
    """Returns the numbers of u8[blocks, bytes], [blocks, numbers], in float32 and then rounded once to `dtype`."""
    # Parts are rounded before they are put together: XLA would write them in float32 otherwise.
    parts = [part.astype(dtype) for part in usual.parts(blocks)]
    return jnp.concatenate(parts, axis=2).reshape(len(blocks), -1)


# jax knows a function again that lives as long as its module: there is one program for each type and dtype.
_values = jax.jit(_rounded, static_argnums=(1, 2))

# All products are exact, so that nothing depends on whether XLA makes one instruction of a product and a difference.


def _q4_0(blocks: jax.Array) -> list[jax.Array]:
    scales, codes = _half(blocks, 0)[..., None, None], blocks[:, None, None, 2:]
    return [scales * (_floats(part) - 8) for part in _nibbles(codes)]


def _q8_0(blocks: jax.Array) -> list[jax.Array]:
    codes = jax.lax.bitcast_convert_type(blocks[:, None, None, 2:], jnp.int8)
    return [_half(blocks, 0)[..., None, None] * _floats(codes)]


def _q4_k(blocks: jax.Array) -> list[jax.Array]:
    scales, minimums = _of_groups(blocks)
    codes = jnp.concatenate(_nibbles(blocks[:, 16:].reshape(-1, 4, 1, 32)), axis=2)
    return [scales * _floats(codes) - minimums]


def _q5_k(blocks: jax.Array) -> list[jax.Array]:
    scales, minimums = _of_groups(blocks)
    fifth = blocks[:, None, None, 16:48]
    pairs = jnp.arange(0, 8, 2, dtype=jnp.uint8).reshape(4, 1, 1)
    return [
        scales[:, :, k : k + 1] * _floats(part | (fifth >> pairs + np.uint8(k) & 1) << 4) - minimums[:, :, k : k + 1]
        for k, part in enumerate(_nibbles(blocks[:, 48:].reshape(-1, 4, 1, 32)))
    ]


def _q6_k(blocks: jax.Array) -> list[jax.Array]:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = _half(blocks, 208) * _floats(jax.lax.bitcast_convert_type(blocks[:, 192:208], jnp.int8))
    scales = jax.lax.optimization_barrier(scales).reshape(-1, 2, 4, 2, 1)
    parts = []
    for k in range(4):
        codes = _nibbles(low[:, :, k % 2 : k % 2 + 1])[k // 2] | (high >> 2 * k & 3) << 4
        values = scales[:, :, k] * (_floats(codes).reshape(-1, 2, 2, 16) - 32)
        parts.append(values.reshape(-1, 2, 1, 32))
    return parts


def _half(blocks: jax.Array, at: int) -> jax.Array:
    """Returns f32[blocks, 1], the number in half precision at that byte of each block."""
    return _floats(jax.lax.bitcast_convert_type(blocks[:, at : at + 2], jnp.float16))[:, None]


def _floats(numbers: jax.Array) -> jax.Array:
    return numbers.astype(jnp.float32)


def _nibbles(codes: jax.Array) -> list[jax.Array]:
    """Returns the lower and the upper four bits of each byte."""
    return [codes & 15, codes >> 4]


def _of_groups(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scales and the minimums f32[blocks, 4, 2, 1] of the groups of 32 of Q4_K and Q5_K.

    Each has six bits: the first four of either kind have a byte each, whose upper two bits are those of the others.
    """
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = jnp.concatenate([first & 63, mixed & 15 | first >> 2 & 48], axis=1)
    minimums = jnp.concatenate([second & 63, mixed >> 4 | second >> 2 & 48], axis=1)
    found = _half(blocks, 0) * _floats(scales), _half(blocks, 2) * _floats(minimums)
    # XLA would compute these again for each of 32 numbers.
    one, other = jax.lax.optimization_barrier(tuple(values.reshape(-1, 4, 2, 1) for values in found))
    return one, other


# By their numbers in ggml. Other types are rare, or decoded as fast by NumPy.
_USUAL: Mapping[int, _Usual] = {
    2: _Usual(32, 18, _q4_0),
    8: _Usual(32, 34, _q8_0),
    12: _Usual(256, 144, _q4_k),
    13: _Usual(256, 176, _q5_k),
    14: _Usual(256, 210, _q6_k),
}
