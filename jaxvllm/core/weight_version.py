"""`WeightVersion`: which weights an engine computes with, for callers and for the names of its pages."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

# What becomes of the KV of requests that run: its pages are dropped and computed again, or the requests go on with it.
KVChange = Literal["drop", "keep"]
MOST_CHARACTERS = 256
_NONCE_BYTES = 16


@dataclass(frozen=True)
class WeightVersion:
    """One of the versions that an engine's weights have had. Raises ValueError for a name that is no text, or too long.

    Outputs tell its `name`, and pages of KV are named by its `mark`. Engines whose weights have the same name, and that
    got it by as many updates in a row, have the same weights. So a trainer may send the weights of one name in parts.
    """

    name: str = "default"  # vLLM's for the weights of the start
    number: int = 0  # of updates so far
    repeats: int = 0  # of updates before this one, in a row, that had the same name
    nonce: bytes = b""  # what tells weights that nobody has named from those of other engines

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MOST_CHARACTERS:
            shown = repr(self.name)[:60]
            raise ValueError(f"version must be a text of 1 to {MOST_CHARACTERS} characters, not {shown}")

    @property
    def is_shared(self) -> bool:
        """Whether other engines may have weights of this version."""
        return not self.nonce

    def after(self, name: str | None) -> "WeightVersion":
        """Returns the version after an update: of that name, or with the number of the update for a name."""
        number = self.number + 1
        if name is None:
            return WeightVersion(str(number), number, nonce=secrets.token_bytes(_NONCE_BYTES))
        return WeightVersion(name, number, self.repeats + 1 if name == self.name else 0)

    def mark(self, digest: bytes) -> bytes:
        """Returns what names a page, or anything else with this digest, among those of all versions: 32 bytes.

        It is the digest itself for the weights of the start.
        """
        if not self.number:
            return digest
        parts = (self.name.encode(errors="surrogatepass"), str(self.repeats).encode(), self.nonce)
        seed = b"".join(hashlib.sha256(part).digest() for part in parts)
        return hashlib.sha256(seed + digest).digest()


@dataclass(frozen=True)
class WeightVersionSpan:
    """The output tokens from `start` to before `end` were sampled by weights of a version, with vLLM's fields."""

    version: str
    start: int
    end: int


def check_kv_change(kv: str) -> None:
    """Raises ValueError for what is no `KVChange`."""
    if kv not in get_args(KVChange):
        raise ValueError(f"kv must be drop or keep, not {kv!r}")


# The first output token of each version of the weights, with its name, in order.
type WeightStarts = list[tuple[int, str]]


def begin_version(starts: WeightStarts, first: int, name: str) -> None:
    """Takes note that output tokens from number `first` on, which nobody has seen yet, are of another version."""
    while starts and starts[-1][0] >= first:
        starts.pop()
    if not starts or starts[-1][1] != name:
        starts.append((first, name))


def version_spans(starts: Sequence[tuple[int, str]], num_tokens: int) -> list[WeightVersionSpan]:
    """Returns the version of each of so many output tokens."""
    ends = [*(first for first, _ in starts[1:]), num_tokens]
    spans = ((name, first, min(end, num_tokens)) for (first, name), end in zip(starts, ends, strict=True))
    return [WeightVersionSpan(name, first, end) for name, first, end in spans if first < end]
