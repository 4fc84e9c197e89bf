"""Transports: the way that pages take from one engine's memory to another's, once both have agreed on them."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import msgspec
from jax.experimental import transfer

from jaxvllm.kv_transfer.page_format import Page, PageFormat, WrongPage

# How often a pull is looked at. Pulls of 256 MB took 0.1 to 4 s between two processes of a busy machine.
_LOOK_SECONDS = 0.002


class PageTransport(Protocol):
    """Gives pages to other engines, and takes what these give. Threads of an engine share one."""

    @property
    def fingerprint(self) -> bytes:
        """The same in engines that can exchange pages this way."""

    @property
    def most_bytes(self) -> int:
        """The most bytes of a frame."""

    def give(self, pages: Sequence[Page]) -> list[bytes]:
        """Returns frames by which another engine gets these pages. They are to be used once."""

    def take(self, frames: Sequence[bytes], seconds: float) -> list[Page]:
        """Returns the pages that another engine gave. Raises WrongPage or TimeoutError where that cannot be."""


class TcpTransport:
    """Pages are in host memory, and each is a frame of the message that answers who wants them."""

    def __init__(self, form: PageFormat):
        self._format = form

    @property
    def fingerprint(self) -> bytes:
        return self._format.fingerprint

    @property
    def most_bytes(self) -> int:
        return self._format.page_bytes + 4096

    def give(self, pages: Sequence[Page]) -> list[bytes]:
        return [self._format.encode(page) for page in pages]

    def take(self, frames: Sequence[bytes], seconds: float) -> list[Page]:
        return [self._format.decode(frame) for frame in frames]


class _Pull(msgspec.Struct, frozen=True, array_like=True):
    """Says where arrays wait, and which arrays each page has of those that a page may have."""

    address: str
    uuid: int
    present: list[list[bool]]


_read_pull = msgspec.msgpack.Decoder(_Pull).decode


class DeviceTransport:
    """Pages stay on the devices, and cross by `jax.experimental.transfer`, by the devices' own network if there is one.

    Both engines need the same mesh of one replica. What another engine asks for and then does not pull stays in memory
    for good: jax cannot take it back. An id is used once, because a second pull of it, or one of an unknown id, never
    ends.
    """

    def __init__(self, form: PageFormat, like: Sequence[jax.ShapeDtypeStruct], host: str):
        """`like`: the arrays of a page, [L, K, S, W], as this engine holds them."""
        self._format = form
        self._like = tuple(like)
        device = min(self._like[0].sharding.device_set, key=lambda one: one.id)
        address = f"{host}:0"
        self._server = transfer.start_transfer_server(device.client, address, [address])
        self._connections: dict[str, transfer.TransferConnection] = {}

    @property
    def fingerprint(self) -> bytes:
        shards = [x.sharding.shard_shape(x.shape) for x in self._like]
        return self._format.fingerprint + f"{shards} {len(self._like[0].sharding.device_set)}".encode()

    @property
    def most_bytes(self) -> int:
        return 1 << 16

    def give(self, pages: Sequence[Page]) -> list[bytes]:
        if not pages:
            return []
        present = [[array is not None for array in page.arrays] for page in pages]
        uuid = secrets.randbits(63)  # nobody guesses it
        self._server.await_pull(uuid, [array for page in pages for array in page.arrays if array is not None])
        return [msgspec.msgpack.encode(_Pull(self._server.address(), uuid, present))]

    def take(self, frames: Sequence[bytes], seconds: float) -> list[Page]:
        deadline = time.monotonic() + seconds
        pages: list[Page] = []
        for frame in frames:
            try:
                pull = _read_pull(frame)
            except msgspec.MsgspecError as error:
                raise WrongPage(f"a frame tells of no arrays to pull: {error}") from error
            if any(len(of_page) != len(self._like) for of_page in pull.present):
                raise WrongPage(f"a page has {len(self._like)} arrays here, and not there")
            pages += self._pull(pull, deadline)
        return pages

    def _pull(self, pull: _Pull, deadline: float) -> list[Page]:
        wanted = [
            like for of_page in pull.present for like, is_there in zip(self._like, of_page, strict=True) if is_there
        ]
        connection = self._connections.get(pull.address)
        if connection is None:
            connection = self._connections[pull.address] = self._server.connect(pull.address)
        try:
            arrays: list[Any] = connection.pull(pull.uuid, wanted)
            while not all(array.is_ready() for array in arrays):
                if time.monotonic() > deadline:  # the peer is stopped, or has forgotten the arrays: this never ends
                    raise TimeoutError("arrays were not pulled in time")
                time.sleep(_LOOK_SECONDS)
            for array in arrays:
                array.block_until_ready()  # raises if the peer has died
        except (RuntimeError, TimeoutError) as error:
            self._connections.pop(pull.address, None)  # the next pull tries another
            raise error if isinstance(error, TimeoutError) else WrongPage(str(error)) from error
        left = iter(arrays)
        return [Page(tuple(next(left) if is_there else None for is_there in of_page)) for of_page in pull.present]
