"""Transports: the way that pages take from one engine's memory to another's, once both have agreed on them."""

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import jax
import msgspec
from jax.experimental import transfer

from jaxvllm.kv_transfer.page_format import Page, PageFormat, WrongPage
from jaxvllm.kv_transfer.peer_messages import PAGES_PER_ANSWER

# How often a pull is looked at. Pulls of 256 MB took 0.1 to 4 s between two processes of a busy machine.
_LOOK_SECONDS = 0.002


class PageTransport(Protocol):
    """Gives pages to other engines, and takes what these give. Threads of an engine share one."""

    @property
    def is_ready(self) -> bool:
        """Whether `fingerprint` is known already."""

    @property
    def fingerprint(self) -> bytes:
        """The same in engines that can exchange pages this way."""

    @property
    def most_bytes(self) -> int:
        """The most bytes of a frame."""

    def give(self, names: Sequence[bytes], pages: Sequence[Page]) -> list[bytes]:
        """Returns frames by which another engine gets these pages, each with its name. They are to be used once."""

    def take(self, frames: Sequence[bytes], names: Sequence[bytes], seconds: float) -> list[Page]:
        """Returns the pages that another engine gave: the first of those with these `names`.

        Raises WrongPage or TimeoutError where that cannot be.
        """


class TcpTransport:
    """Pages are in host memory, and each is a frame of the message that answers who wants them."""

    def __init__(self, form: PageFormat):
        self._format = form

    @property
    def is_ready(self) -> bool:
        return self._format.is_known

    @property
    def fingerprint(self) -> bytes:
        return self._format.fingerprint

    @property
    def most_bytes(self) -> int:
        return max(self._format.most_bytes, 4096)  # a frame may also say why there are no pages

    def give(self, names: Sequence[bytes], pages: Sequence[Page]) -> list[bytes]:
        return [self._format.encode(name, page) for name, page in zip(names, pages, strict=True)]

    def take(self, frames: Sequence[bytes], names: Sequence[bytes], seconds: float) -> list[Page]:
        return [self._format.decode(name, frame) for name, frame in zip(names, frames, strict=False)]


class _Pull(msgspec.Struct, frozen=True, array_like=True):
    """Says where arrays wait, and which arrays each page has of those that a page may have.

    What is wrong with an address or an id is found here: jax's own code might end the process for it.
    """

    address: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._:%\[\]-]{1,255}:[0-9]{1,5}$")]
    uuid: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    present: Annotated[list[list[bool]], msgspec.Meta(max_length=PAGES_PER_ANSWER)]
    names: list[bytes]


_read_pull = msgspec.msgpack.Decoder(_Pull).decode


class DeviceTransport:
    """Pages stay on the devices, and cross by `jax.experimental.transfer`, by the devices' own network if there is one.

    Both engines need the same mesh of one replica. What another engine asks for and then does not pull stays in memory
    for good: jax cannot take it back. An id is used once, because a second pull of it, or one of an unknown id, never
    ends. Bytes that are none of jax's end the process that they are sent to (jax 0.11.2), so the address is one that
    only engines of one's own reach.
    """

    def __init__(self, form: PageFormat, like: Sequence[jax.ShapeDtypeStruct], host: str):
        """Starts a server of pages whose arrays [L, K, S, W] are `like` those that this engine holds."""
        self._format = form
        self._like = tuple(like)
        device = min(self._like[0].sharding.device_set, key=lambda one: one.id)
        address = f"{host}:0"
        self._server = transfer.start_transfer_server(device.client, address, [address])
        self._connections: dict[str, transfer.TransferConnection] = {}

    @property
    def is_ready(self) -> bool:
        return self._format.is_known

    @property
    def fingerprint(self) -> bytes:
        shards = [x.sharding.shard_shape(x.shape) for x in self._like]
        return self._format.fingerprint + f"{shards} {len(self._like[0].sharding.device_set)}".encode()

    @property
    def most_bytes(self) -> int:
        return 1 << 16

    def give(self, names: Sequence[bytes], pages: Sequence[Page]) -> list[bytes]:
        if not pages:
            return []
        present = [[array is not None for array in page.arrays] for page in pages]
        uuid = secrets.randbits(63)  # nobody guesses it
        self._server.await_pull(uuid, [array for page in pages for array in page.arrays if array is not None])
        return [msgspec.msgpack.encode(_Pull(self._server.address(), uuid, present, list(names)))]

    def take(self, frames: Sequence[bytes], names: Sequence[bytes], seconds: float) -> list[Page]:
        deadline = time.monotonic() + seconds
        pages: list[Page] = []
        for frame in frames:
            try:
                pull = _read_pull(frame)
            except msgspec.MsgspecError as error:
                raise WrongPage(f"a frame tells of no arrays to pull: {error}") from error
            if any(len(of_page) != len(self._like) for of_page in pull.present):
                raise WrongPage(f"a page has {len(self._like)} arrays here, and not there")
            if pull.names != list(names[len(pages) : len(pages) + len(pull.present)]):
                raise WrongPage("other pages came than those that were asked for")
            pages += self._pull(pull, deadline)
        return pages

    def _pull(self, pull: _Pull, deadline: float) -> list[Page]:
        wanted = [
            like for of_page in pull.present for like, is_there in zip(self._like, of_page, strict=True) if is_there
        ]
        try:
            connection = self._connections.get(pull.address)
            if connection is None:
                connection = self._connections[pull.address] = self._server.connect(pull.address)
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
