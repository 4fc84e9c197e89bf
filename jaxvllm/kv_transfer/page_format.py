"""The form in which a page travels: what it holds, which engines may exchange it, and how it looks as bytes."""

import hashlib
import math
import struct
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

# It changes whenever a page's bytes, or the hashes that name pages, mean something else.
VERSION = 2
_MAGIC = b"jaxvllmK"
# Magic, version, which arrays follow (one bit each), the fingerprint of the format, the page's name, and the payload's
# CRC-32 and size.
_HEADER = struct.Struct("<8sII32s32sIQ")
NAME_BYTES = 32  # of a page: SHA-256 of all tokens up to its end


class WrongPage(ValueError):
    """Bytes that are not the page that was asked for: of another name, model, dtype or version, or damaged."""


@dataclass(frozen=True)
class PageArray:
    """One array of a page, [L, K, S, W], as all engines exchange it, and how an engine holds it.

    The scales of tokens are an array of their own, whose last axes are others.

    An engine that is spread over more devices than there are KV heads holds each head `copies` times, side by side. One
    whose layers are divided among stages has room in each for as many layers as the stage has that has most of them.
    """

    num_layers: int  # of the model
    num_heads: int  # each counted once
    page_size: int
    width: int  # of keys and values side by side, with what pads them
    dtype: np.dtype
    copies: int = 1
    stages: tuple[int, ...] = ()  # the layers of each; empty: the layers are not divided
    group: int = 0  # whose page numbers it has

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_layers, self.num_heads, self.page_size, self.width)

    @property
    def held_shape(self) -> tuple[int, int, int, int]:
        """The shape of what the engine holds."""
        num_layers = len(self.stages) * max(self.stages) if self.stages else self.num_layers
        return (num_layers, self.copies * self.num_heads, self.page_size, self.width)

    @property
    def places(self) -> slice | list[int]:
        """The places of the layers in what the engine holds."""
        if not self.stages:
            return slice(None)
        room = max(self.stages)
        return [stage * room + i for stage, count in enumerate(self.stages) for i in range(count)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        """The description that must be the same in engines that exchange it."""
        return f"{self.shape} {self.dtype.name}"


@dataclass(frozen=True, eq=False)
class Page:
    """The content of one page in each array of the cache, [L, K, S, W], or None where its tokens had left the window.

    The arrays are on the host, or on the devices of an engine, whose copies of heads they have then.
    """

    arrays: tuple[NDArray[Any] | jax.Array | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)


@dataclass(frozen=True)
class PageFormat:
    """The form in which the pages of an engine travel. Engines with the same `fingerprint` may exchange them.

    `model` tells one model's weights from another's; it may still be on its way, because it takes time to read all
    weights. A page's name, the hash of all tokens up to its end, is the same in all engines, and so is what it holds,
    bit by bit, for engines with the same kernels.
    """

    model: str | Future[str]
    arrays: tuple[PageArray, ...]

    @property
    def is_known(self) -> bool:
        """Whether `fingerprint` neither waits nor fails."""
        return isinstance(self.model, str) or (self.model.done() and self.model.exception() is None)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that differ where model, dtype, shape or version differ. It waits for the model's name.

        Raises OSError where the weights could not be read once more for that.
        """
        model = self.model if isinstance(self.model, str) else self.model.result()
        parts = (f"jaxvllm pages {VERSION}", model, *(array.text for array in self.arrays))
        return hashlib.sha256("\n".join(parts).encode()).digest()

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.arrays[0].page_size

    @property
    def page_bytes(self) -> int:
        """The most bytes that a page holds."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def most_bytes(self) -> int:
        """The most bytes that `encode` returns."""
        return _HEADER.size + self.page_bytes

    def page(self, contents: tuple[NDArray[np.generic] | None, ...]) -> Page:
        """Makes a page of what an engine holds, of `held_shape` each. The arrays are copied."""
        found = zip(self.arrays, contents, strict=True)
        return Page(tuple(None if x is None else x[of.places, :: of.copies].copy() for of, x in found))

    def held(self, page: Page) -> tuple[NDArray[np.generic], ...]:
        """Returns what an engine holds of `page`, of `held_shape` each, zeros where the page has nothing."""
        held = []
        for of, x in zip(self.arrays, page.arrays, strict=True):
            held.append(np.zeros(of.held_shape, of.dtype))
            if x is not None:
                held[-1][of.places] = np.repeat(x, of.copies, axis=1)
        return tuple(held)

    def encode(self, name: bytes, page: Page) -> bytes:
        """Returns the page of that name as bytes."""
        assert len(name) == NAME_BYTES, "a page's name is a SHA-256"
        present = sum(1 << at for at, array in enumerate(page.arrays) if array is not None)
        payload = b"".join(array.tobytes() for array in page.arrays if array is not None)
        crc = zlib.crc32(payload)
        return _HEADER.pack(_MAGIC, VERSION, present, self.fingerprint, name, crc, len(payload)) + payload

    def decode(self, name: bytes, data: bytes | memoryview) -> Page:
        """Reads what `encode` wrote for that name. Raises WrongPage, which says why, for anything else."""
        if len(data) < _HEADER.size:
            raise WrongPage(f"a page has at least {_HEADER.size} bytes, and here are {len(data)}")
        magic, version, present, fingerprint, found, crc, size = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise WrongPage(f"a page begins with {_MAGIC!r}, not with {magic!r}")
        if version != VERSION:
            raise WrongPage(f"the page has version {version}, and this engine reads {VERSION}: use the same version")
        if fingerprint != self.fingerprint:
            raise WrongPage("the page is of another model, dtype or shape: use engines that are alike")
        if found != name:
            raise WrongPage(f"it is the page {found.hex()[:16]}..., and {name.hex()[:16]}... was asked for")
        payload = memoryview(data)[_HEADER.size :]
        if present >> len(self.arrays):
            raise WrongPage(f"a page has {len(self.arrays)} arrays, and this one claims more")
        wanted = [of.nbytes if present >> at & 1 else 0 for at, of in enumerate(self.arrays)]
        if len(payload) != size or size != sum(wanted):
            raise WrongPage(f"the page should have {sum(wanted)} bytes and has {len(payload)}: it was cut off")
        if zlib.crc32(payload) != crc:
            raise WrongPage("the page is damaged: its check sum differs")
        arrays: list[NDArray[np.generic] | None] = []
        for of, count in zip(self.arrays, wanted, strict=True):
            arrays.append(np.frombuffer(payload[:count], of.dtype).reshape(of.shape) if count else None)
            payload = payload[count:]
        return Page(tuple(arrays))
