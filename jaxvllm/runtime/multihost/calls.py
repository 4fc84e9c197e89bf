"""The calls that change a device, as values that can be sent to another process."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from jaxvllm.runtime.buckets import Bucket


@dataclass(frozen=True)
class Admit:
    """Gives new requests their slots."""

    packed: NDArray[np.int32]  # [ADMISSION_BATCH, words], made by `pack_admissions`


@dataclass(frozen=True)
class Step:
    """Computes one step."""

    bucket: Bucket
    packed: NDArray[np.int32]  # [words], made by `pack`


@dataclass(frozen=True)
class Forward:
    """Computes the first half of a step. Its second half follows as `SampleRows`."""

    bucket: Bucket
    packed: NDArray[np.int32]  # the same as in a `Step`


@dataclass(frozen=True)
class Mask:
    """Gives some slots their token masks."""

    packed: NDArray[np.int32]  # [MASK_BATCH, words], made by `pack_masks`


@dataclass(frozen=True)
class Read:
    """Reads something for some rows of a step whose first half is computed."""

    bucket: Bucket
    packed: NDArray[np.int32]  # made by the readout
    readout: int  # its number among `DEVICE_READOUTS`


@dataclass(frozen=True)
class SampleRows:
    """Computes the second half of a step."""

    bucket: Bucket


@dataclass(frozen=True)
class SampleSome:
    """Computes the second half of a step for some of the replicas that run it together."""

    bucket: Bucket
    packed: NDArray[np.int32]  # [replicas]: 1 for these, 0 for the others
    is_last: bool  # whether all others have sampled, or have nothing to sample


@dataclass(frozen=True)
class Recall:
    """Gives a slot tokens that no step computes."""

    packed: NDArray[np.int32]  # [words], made by `pack_recalls`


@dataclass(frozen=True)
class AdmitRare:
    """Gives a new request's slot what few requests fill."""

    packed: NDArray[np.int32]  # [words], made by `pack_rare`


@dataclass(frozen=True)
class Recount:
    """Counts tokens that a slot's request had sampled before it was preempted."""

    packed: NDArray[np.int32]  # [words], made by `pack_recounts`


@dataclass(frozen=True)
class FillSideRows:
    """Fills rows of the side store."""

    packed: NDArray[np.int32]  # [SIDE_BATCH, words], made by `SideShape.pack`


@dataclass(frozen=True)
class ForkSlots:
    """Makes slots copies of others."""

    packed: NDArray[np.int32]  # [FORK_BATCH, words], made by `pack_forks`


@dataclass(frozen=True)
class TakeLoads:
    """Begins to count anew how many tokens choose each expert."""


@dataclass(frozen=True)
class PlaceExperts:
    """Moves the experts of a layer."""

    packed: NDArray[np.int32]  # [slots]: the expert that each shall have
    layer: int


@dataclass(frozen=True)
class ReadWeights:
    """Replaces the weights by those of a directory, which each process reads on its host."""

    packed: NDArray[np.int32]  # [words], made by `of`

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Packs the bytes of the path, filled up with zeros, which no path contains."""
        name = os.fsencode(directory)
        return cls(np.frombuffer(name + bytes(-len(name) % 4), "<i4"))

    @property
    def directory(self) -> Path:
        return Path(os.fsdecode(self.packed.astype("<i4").tobytes().rstrip(b"\0")))


@dataclass(frozen=True)
class FillAdapter:
    """Brings an adapter into its slot."""

    packed: NDArray[np.int32]  # [words], made by `AdapterFill.packed`


@dataclass(frozen=True)
class EmptyAdapters:
    """Makes the slots of adapters as new."""


@dataclass(frozen=True)
class Reset:
    """Makes pages and state as new."""


@dataclass(frozen=True)
class ReleasePages:
    """Frees pages and state, until a `Reset`."""


@dataclass(frozen=True)
class ParkWeights:
    """Moves the weights to the host's memory, until `UnparkWeights`."""


@dataclass(frozen=True)
class UnparkWeights:
    """Brings the weights back to the devices."""


@dataclass(frozen=True)
class DropWeights:
    """Frees the weights, until `ReadWeights` brings others."""


@dataclass(frozen=True)
class Close:
    """Frees the device's memory. No call follows."""


@dataclass(frozen=True)
class Abandon:
    """Tells the processes that wait for a call that there will be none. It is no call of a device itself."""


type Call = (
    Admit
    | AdmitRare
    | Recall
    | Recount
    | FillSideRows
    | Step
    | Forward
    | Mask
    | Read
    | SampleRows
    | SampleSome
    | ForkSlots
    | TakeLoads
    | PlaceExperts
    | ReadWeights
    | FillAdapter
    | EmptyAdapters
    | Reset
    | ReleasePages
    | ParkWeights
    | UnparkWeights
    | DropWeights
    | Close
)
type Message = Call | Abandon

# On the wire a message is a header and then its packed words: little-endian, 32 bits each, and no code to execute.
_HEADER = struct.Struct(
    "<13I"
)  # the kind, eight numbers of the bucket, one of the kind's own, the two sizes of the array, and the number of words
_KINDS: tuple[type[Message], ...] = (
    Reset,
    Close,
    Abandon,
    Admit,
    AdmitRare,
    Recall,
    Recount,
    Step,
    Forward,
    Mask,
    Read,
    SampleRows,
    SampleSome,
    ForkSlots,
    FillSideRows,
    TakeLoads,
    PlaceExperts,
    ReadWeights,
    ReleasePages,
    ParkWeights,
    UnparkWeights,
    DropWeights,
    FillAdapter,
    EmptyAdapters,
)
# The field of the kind's own number.
_OWN_FIELDS: Mapping[type[Message], str] = {
    Read: "readout",
    SampleSome: "is_last",
    PlaceExperts: "layer",
}
_NO_WORDS = np.zeros(0, np.int32)


def to_bytes(message: Message) -> bytes:
    """Encodes `message` for the wire."""
    bucket: Bucket | None = getattr(message, "bucket", None)
    words: NDArray[np.int32] = getattr(message, "packed", _NO_WORDS)
    sizes: tuple[int, ...] = (0,) * 8
    if bucket is not None:
        of_bucket = (bucket.num_tokens, bucket.num_rows, bucket.width, bucket.is_split, bucket.num_drafts)
        sizes = (*of_bucket, bucket.is_blind, bucket.is_plain, bucket.is_adapted)
    shape = words.shape if words.ndim == 2 else (0, 0)
    own_field = _OWN_FIELDS.get(type(message))
    own = 0 if own_field is None else getattr(message, own_field)
    header = _HEADER.pack(_KINDS.index(type(message)), *sizes, own, *shape, words.size)
    return header + words.astype("<i4").tobytes()


def read_message(stream: BinaryIO) -> Message | None:
    """Reads the next message. Returns None when the stream ends, even within a message.

    Raises ValueError for bytes that are no message.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, tokens, rows, width, is_split, num_drafts, *flags, own, first, second, num_words = _HEADER.unpack(header)
    payload = stream.read(4 * num_words)
    if len(payload) < 4 * num_words:
        return None
    if kind >= len(_KINDS):
        last = len(_KINDS) - 1
        raise ValueError(
            f"a message of kind {kind} came, and the last kind is {last}: start all processes with the same version"
        )
    packed = np.frombuffer(payload, "<i4")
    arguments: dict[str, Any] = {}
    if tokens:
        arguments["bucket"] = Bucket(tokens, rows, width, bool(is_split), num_drafts, *map(bool, flags))
    if num_words:
        arguments["packed"] = packed.reshape(first, second) if first else packed
    if (own_field := _OWN_FIELDS.get(_KINDS[kind])) is not None:
        arguments[own_field] = own
    return _KINDS[kind](**arguments)
