"""The messages between an engine that has pages and one that wants them: MessagePack by msgspec, over ZeroMQ."""

import msgspec

# Pages of one answer. Sixteen of an 8B model's are 32 MiB.
PAGES_PER_ANSWER = 16
# Questions of one request that wait for their answers: the network is never idle between two answers.
ANSWERS_AHEAD = 2


class Want(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for pages. An engine that has the signature of a request's ticket may have the pages of that request."""

    number: int  # which the answer has, too
    request_id: str
    signature: str
    fingerprint: bytes  # of the format in which they are wanted
    hashes: list[bytes]  # at most PAGES_PER_ANSWER


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that nothing more of a request is wanted. There is no answer."""

    request_id: str
    signature: str


class Pages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers a `Want`. The frames of the transport follow, with the first of the pages that were asked for."""

    number: int
    reason: str = ""  # why these are not all of them


type Message = Want | Done

_want = msgspec.msgpack.Decoder(Want | Done)
_pages = msgspec.msgpack.Decoder(Pages)
encode = msgspec.msgpack.encode


def decode_message(data: bytes) -> Message:
    """Reads what a consumer sends. Raises msgspec.MsgspecError for anything else."""
    message: Message = _want.decode(data)
    return message


def decode_answer(data: bytes) -> Pages:
    """Reads the first frame of an answer. Raises msgspec.MsgspecError for anything else."""
    return _pages.decode(data)
