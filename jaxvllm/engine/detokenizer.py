"""Tokens to text, a few at a time: never half a character, in the end exactly the full decode's text."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# How many tokens a window waits for a character to become whole: UTF-8 has at most four bytes, and a
# decoder that gives a replacement character for longer than this means it.
MAX_PARTIAL_TOKENS = 8

type Decode = Callable[[Sequence[int]], str]


class Detokenizer(Protocol):
    """The text of one completion as its tokens arrive."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        ...

    def flush(self) -> str:
        """The text still waiting for a token; nothing may be pushed afterwards."""
        ...


class ByteLevelPieces(dict[int, bytes]):
    """Token id -> the bytes it stands for in a byte-level vocabulary; filled on demand.

    `token` gives a token's spelling (None for an unknown id). Ids in `skipped` stand for no bytes.
    """

    def __init__(self, token: Callable[[int], str | None], skipped: Iterable[int]) -> None:
        super().__init__((token_id, b"") for token_id in skipped)
        self._token = token
        self._byte_of = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        spelling = self._token(token_id) or ""
        try:
            piece = bytes([self._byte_of[char] for char in spelling])
        except KeyError:  # an added token, spelt as itself
            piece = spelling.encode()
        self[token_id] = piece
        return piece


def byte_alphabet() -> dict[str, int]:
    """The character that spells each byte in a byte-level vocabulary (GPT-2's table), char -> byte.

    Printable Latin-1 characters spell themselves; the other bytes, in order, are U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelDetokenizer:
    """For byte-level vocabularies: a table look-up a token and one incremental UTF-8 decoder."""

    def __init__(self, pieces: ByteLevelPieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = self._pieces
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a window of the last few tokens and returns what is new in it.

    The window begins with the tokens of the last text returned, or of the prompt's end: decoders treat the
    first token of a text apart (SentencePiece drops its space). Runs of byte tokens wait until the run ends,
    because its last byte decides whether all the others are text: a full decode replaces every byte of a run
    that is not valid UTF-8. Tokens that `shows` refuses (skipped ones, ids without a spelling) never enter
    the window: a full decode leaves them out before it looks for runs.
    """

    def __init__(
        self,
        decode: Decode,
        shows: Callable[[int], bool],
        byte_tokens: frozenset[int],
        context: Sequence[int],
    ) -> None:
        self._decode = decode
        self._shows = shows
        self._byte_tokens = byte_tokens
        self._window = [token_id for token_id in context if shows(token_id)]
        while self._window and self._window[-1] in byte_tokens:  # the output starts a run of its own
            self._window.pop()
        self._num_read = len(self._window)  # tokens of the window whose text was returned
        self._read_text = decode(self._window)

    def push(self, token_ids: Iterable[int]) -> str:
        new = [token_id for token_id in token_ids if self._shows(token_id)]
        self._window += new
        if not new or new[-1] in self._byte_tokens:
            return ""
        text = self._decode(self._window)
        waiting = len(self._window) - self._num_read
        # Of several tokens the last may be the first of a character, however many wait.
        if text.endswith(REPLACEMENT) and (len(new) > 1 or waiting <= MAX_PARTIAL_TOKENS):
            return ""
        return self._read(text)

    def flush(self) -> str:
        return self._read(self._decode(self._window))

    def _read(self, text: str) -> str:
        """Returns what `text`, the window's, adds, and moves the window on."""
        if not text.startswith(self._read_text):
            return ""  # the decoder rewrote the past: wait until it agrees again
        new = text[len(self._read_text) :]
        if new:
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._read_text = self._decode(self._window)
        return new


class SilentDetokenizer:
    """For requests that want no text."""

    def push(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
