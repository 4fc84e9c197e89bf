"""Converts tokens to text, a few at a time. It never returns half a character, and all text equals a full decode's."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# The number of tokens that a window waits for a character to become complete: UTF-8 has at most four bytes, and after
# more tokens than this a replacement character from the decoder is final.
MAX_PARTIAL_TOKENS = 8

type Decode = Callable[[Sequence[int]], str]


class Detokenizer(Protocol):
    """Converts the tokens of one completion to text as they arrive."""

    @property
    def is_whole(self) -> bool:
        """Whether no token waits for others to become text."""
        ...

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds the next tokens and returns the text that they complete."""
        ...

    def flush(self) -> str:
        """Returns the text that still waits for a token. Nothing may be pushed afterwards."""
        ...


class ByteLevelPieces(dict[int, bytes]):
    """Maps each token id of a byte-level vocabulary to its bytes, filled on demand.

    `token` returns a token's spelling (None for an unknown id). Ids in `skipped` have no bytes.
    """

    def __init__(self, token: Callable[[int], str | None], skipped: Iterable[int]) -> None:
        super().__init__((token_id, b"") for token_id in skipped)
        self._token = token
        self._byte_of = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        spelling = self._token(token_id) or ""
        try:
            piece = bytes([self._byte_of[char] for char in spelling])
        except KeyError:  # an added token, which is spelled as plain text
            piece = spelling.encode()
        self[token_id] = piece
        return piece


def byte_alphabet() -> dict[str, int]:
    """Maps each character of a byte-level vocabulary (GPT-2's table) to the byte that it spells.

    Printable Latin-1 characters spell themselves. The other bytes, in order, are spelled U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelDetokenizer:
    """The detokenizer for byte-level vocabularies: a table look-up for each token and an incremental UTF-8 decoder."""

    def __init__(self, pieces: ByteLevelPieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_whole(self) -> bool:
        return not self._utf8.getstate()[0]

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = self._pieces
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """The detokenizer for every other decoder: it decodes a window of the last few tokens and returns the new text.

    The window begins with the tokens of the last returned text, or of the prompt's end, because decoders treat the
    first token of a text differently (SentencePiece drops its space). A run of byte tokens waits until it ends, because
    its last byte decides whether all the others are text: a full decode replaces every byte of a run that is not valid
    UTF-8. Tokens that `shows` refuses (skipped ones, ids without a spelling) never enter the window, because a full
    decode leaves them out before it looks for runs.
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
        while self._window and self._window[-1] in byte_tokens:  # the output must start its own run of byte tokens
            self._window.pop()
        self._num_read = len(self._window)  # tokens of the window whose text was returned
        self._read_text = decode(self._window)

    @property
    def is_whole(self) -> bool:
        return self._num_read == len(self._window)

    def push(self, token_ids: Iterable[int]) -> str:
        new = [token_id for token_id in token_ids if self._shows(token_id)]
        self._window += new
        if not new or new[-1] in self._byte_tokens:
            return ""
        text = self._decode(self._window)
        waiting = len(self._window) - self._num_read
        # Among several new tokens, the last may begin a character, no matter how many wait.
        if text.endswith(REPLACEMENT) and (len(new) > 1 or waiting <= MAX_PARTIAL_TOKENS):
            return ""
        return self._read(text)

    def flush(self) -> str:
        return self._read(self._decode(self._window))

    def _read(self, text: str) -> str:
        """Returns the new part of `text`, the window's text, and advances the window."""
        if not text.startswith(self._read_text):
            return ""  # the decoder changed earlier text: wait until it agrees again
        new = text[len(self._read_text) :]
        if new:
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._read_text = self._decode(self._window)
        return new


class SilentDetokenizer:
    """The detokenizer for requests that want no text."""

    is_whole = True

    def push(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
