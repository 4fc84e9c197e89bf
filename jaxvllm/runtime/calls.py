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


type Call = Admit | Step | Reset | Close
type Message = Call | Abandon

# On the wire a message is a header, then its packed words: little-endian int32 throughout, nothing that could be run.
_HEADER = struct.Struct("<4i")  # kind, two sizes, number of words
_WORDLESS = (Reset(), Close(), Abandon())
_ADMIT, _STEP = 3, 4


def to_bytes(message: Message) -> bytes:
    """`message` on the wire."""
    match message:
        case Admit(packed):
            sizes, words = (_ADMIT, len(packed), packed.shape[1]), packed
        case Step(bucket, packed):
            sizes, words = (_STEP, bucket.num_tokens, bucket.num_rows), packed
        case _:
            sizes, words = (_WORDLESS.index(message), 0, 0), np.zeros(0, np.int32)
    return _HEADER.pack(*sizes, words.size) + words.astype("<i4").tobytes()


def read_message(stream: BinaryIO) -> Message | None:
    """The next message on the wire; None where that ends, be it in the middle of one."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, first, second, num_words = _HEADER.unpack(header)
    payload = stream.read(4 * num_words)
    if len(payload) < 4 * num_words:
        return None
    packed = np.frombuffer(payload, "<i4")
    if kind == _ADMIT:
        return Admit(packed.reshape(first, second))
    if kind == _STEP:
        return Step(Bucket(first, second), packed)
    return _WORDLESS[kind]
