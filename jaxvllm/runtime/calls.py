"""The calls of a device: everything that changes it, as values that can be told to another process."""

import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxvllm.runtime.buckets import Bucket


@dataclass(frozen=True)
class Admit:
    """New requests get their slots."""

    packed: NDArray[np.int32]  # [ADMISSION_BATCH, words], of `pack_admissions`


@dataclass(frozen=True)
class Step:
    """One step is computed."""

    bucket: Bucket
    packed: NDArray[np.int32]  # [packed_size(bucket)], of `pack`


@dataclass(frozen=True)
class Reset:
    """Pages and state become as new."""


@dataclass(frozen=True)
class Close:
    """The memory is given back; nothing comes after."""


@dataclass(frozen=True)
class Abandon:
    """No call of a device, but the last word to those who wait for one: there will be no engine to follow."""


@dataclass(frozen=True)
class Ready:
    """No call either, and the one thing that a follower says: it has compiled the step of `bucket`."""

    bucket: Bucket


type Call = Admit | Step | Reset | Close
type Message = Call | Abandon | Ready

# On the wire a message is a header, then its packed words: little-endian, 32 bits each, nothing that could be run.
_HEADER = struct.Struct("<4I")  # kind, two sizes, number of words
_BARE = (Reset(), Close(), Abandon())  # of kinds 0, 1 and 2
_ADMIT, _STEP, _READY = 3, 4, 5
_NO_WORDS = np.zeros(0, np.int32)


def to_bytes(message: Message) -> bytes:
    """`message` on the wire."""
    match message:
        case Admit(packed):
            kind, sizes, words = _ADMIT, packed.shape, packed
        case Step(bucket, packed):
            kind, sizes, words = _STEP, (bucket.num_tokens, bucket.num_rows), packed
        case Ready(bucket):
            kind, sizes, words = _READY, (bucket.num_tokens, bucket.num_rows), _NO_WORDS
        case _:
            kind, sizes, words = _BARE.index(message), (0, 0), _NO_WORDS
    return _HEADER.pack(kind, *sizes, words.size) + words.astype("<i4").tobytes()


def read_message(stream: BinaryIO) -> Message | None:
    """The next message on the wire; None where that ends, be it in the middle of one. ValueError when it is none."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, first, second, num_words = _HEADER.unpack(header)
    payload = stream.read(4 * num_words)
    if len(payload) < 4 * num_words:
        return None
    packed = np.frombuffer(payload, "<i4")
    if kind < len(_BARE):
        return _BARE[kind]
    if kind == _ADMIT:
        return Admit(packed.reshape(first, second))
    if kind == _STEP:
        return Step(Bucket(first, second), packed)
    if kind == _READY:
        return Ready(Bucket(first, second))
    raise ValueError(f"a message of kind {kind}, and the last is {_READY}: start all processes with the same version")
