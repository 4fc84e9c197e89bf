"""What the instructions that add up products do, in NumPy, after the manuals of Intel and Arm."""

from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.cpu.amx import Factors

type Array = NDArray[np.generic]
TINY = np.finfo(np.float32).tiny


def flushed(numbers: Array) -> Array:
    """Rounds to float32, and denormal numbers to zeros of their sign."""
    with np.errstate(all="ignore"):
        rounded = numbers.astype(np.float32)
    return np.where(np.abs(rounded) < TINY, np.copysign(np.float32(0), rounded), rounded)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c, rounded once: float64 has the product of two bfloat16 and its sum with a float32 whole."""
    with np.errstate(all="ignore"):
        return flushed(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))


def pairs(words: Array) -> list[Array]:
    """Returns the first and the second bfloat16 of each word."""
    both = words.view(np.uint32).view(ml_dtypes.bfloat16).reshape(*words.shape, 2).astype(np.float32)
    return [flushed(both[..., 0]), flushed(both[..., 1])]


def vdpbf16ps(a: Array, b: Array, c: Array) -> Array:
    (a0, a1), (b0, b1) = pairs(a), pairs(b)
    return fma(a0, b0, fma(a1, b1, flushed(c.view(np.float32)))).view(np.int32)


def _to_odd(a: Array, b: Array) -> Array:
    """Returns a + b as float32: what lies between two becomes the one whose last bit is 1, denormal ones zero."""
    near = (a + b).astype(np.float32)
    numbers = ([Fraction(float(one)) for one in some] for some in (a, b, near))
    lost = np.asarray([x + y - total for x, y, total in zip(*numbers, strict=True)])
    other = np.nextafter(near, np.where(lost > 0, np.inf, -np.inf).astype(np.float32))
    is_odd = (near.view(np.int32) & 1).astype(bool)
    return flushed(np.where((lost == 0) | is_odd, near, other))


def bfdot(a: Array, b: Array, c: Array) -> Array:
    (a0, a1), (b0, b1) = pairs(a), pairs(b)
    with np.errstate(all="ignore"):
        products = flushed(a0 * b0), flushed(a1 * b1)
    return _to_odd(flushed(c.view(np.float32)), _to_odd(*products)).view(np.int32)


def byte_products(a: Array, b: Array, a_dtype: str, b_dtype: str) -> Array:
    """Returns the products of the four bytes of each word, [.., 4]."""
    first, second = (
        x.view(np.int32).view(dtype).reshape(*x.shape, 4).astype(np.int32) for x, dtype in ((a, a_dtype), (b, b_dtype))
    )
    return first * second


def of_bytes(a_dtype: str, b_dtype: str) -> Callable[[Array, Array, Array], Array]:
    """Returns `vpdpbusd` and its like, which wrap around."""
    return lambda a, b, c: (byte_products(a, b, a_dtype, b_dtype).sum(-1) + c.astype(np.int64)).astype(np.int32)


def vpmaddubsw(a: Array, b: Array, c: Array) -> Array:
    """`vpmaddubsw`, and `vpmaddwd` by ones."""
    products = byte_products(a, b, "uint8", "int8")
    halves = [np.clip(products[..., n] + products[..., n + 1], -(2**15), 2**15 - 1) for n in (0, 2)]
    return (c.astype(np.int64) + halves[0] + halves[1]).astype(np.int32)


MODELS = {
    "vdpbf16ps": vdpbf16ps,
    "bfdot": bfdot,
    "vpmaddubsw": vpmaddubsw,
    "vpdpbusd": of_bytes("uint8", "int8"),
    "vpdpbssd": of_bytes("int8", "int8"),
    "vpdpbuud": of_bytes("uint8", "uint8"),
    "sdot": of_bytes("int8", "int8"),
    "udot": of_bytes("uint8", "uint8"),
    "usdot": of_bytes("uint8", "int8"),
}


def tile_product(factors: Factors, a: Array, b: Array, c: Array) -> Array:
    """Returns c [M, N] plus the products of a [M, K] and b [K, N], all of words of 32 bits (`tdpbf16ps`, `tdpbssd`)."""
    if factors == "bfloat16":
        return _tdpbf16ps(a, b, c)
    total = c.astype(np.int64)
    for k in range(a.shape[1]):
        ones = np.broadcast_to(a[:, k, None], c.shape).copy(), np.broadcast_to(b[k], c.shape).copy()
        total = total + byte_products(*ones, *factors.split()).sum(-1)
    return total.astype(np.int32)


def _tdpbf16ps(a: Array, b: Array, c: Array) -> Array:
    sums = [np.zeros(c.shape, np.float32) for _ in range(2)]
    a_pairs, b_pairs = pairs(a), pairs(b)
    for k in range(a.shape[1]):
        for n in range(2):
            sums[n] = fma(a_pairs[n][:, k, None], b_pairs[n][k][None], sums[n])
    with np.errstate(all="ignore"):
        return flushed(flushed(c.view(np.float32)) + flushed(sums[0] + sums[1])).view(np.int32)
