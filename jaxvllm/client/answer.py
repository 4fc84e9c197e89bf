"""One answer while it arrives: its text, and what it cost."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxvllm.client.chunks import Chunk, Usage


@dataclass(frozen=True)
class Stats:
    """What `--stats` prints. Times in seconds from the moment the request was sent."""

    first_token: float | None  # None: there was no token
    last_token: float | None
    usage: Usage | None  # None: the stream was stopped before the server told

    def __str__(self) -> str:
        if self.first_token is None or self.last_token is None:
            return "no token"
        parts = [f"first token after {self.first_token * 1000:.0f} ms"]
        if self.usage is not None:
            # The first token's time is its own figure: the rate is that of the tokens behind it.
            if self.usage.completion_tokens > 1 and self.last_token > self.first_token:
                rate = (self.usage.completion_tokens - 1) / (self.last_token - self.first_token)
                parts.append(f"{rate:.1f} tokens per second")
            cached = f" ({self.usage.cached_tokens} cached)" if self.usage.cached_tokens else ""
            parts.append(f"{self.usage.prompt_tokens} tokens in{cached}, {self.usage.completion_tokens} out")
        parts.append(f"{self.last_token:.2f} s in all")
        return ", ".join(parts)


class Answer:
    """Takes a stream of chunks apart; `text` and `stats` hold also when the stream is stopped half way."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._sent = clock()
        self._first: float | None = None
        self._last: float | None = None
        self._usage: Usage | None = None
        self._pieces: list[str] = []
        self.finish_reason: str | None = None

    def read(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """The text, piece by piece as it arrives."""
        for chunk in chunks:
            self._usage = chunk.usage or self._usage
            if not chunk.choices or chunk.choices[0].opens:
                continue
            [choice, *_] = chunk.choices
            self._last = self._clock() - self._sent
            if self._first is None:
                self._first = self._last
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.new_text:
                self._pieces.append(choice.new_text)
                yield choice.new_text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stats(self) -> Stats:
        return Stats(self._first, self._last, self._usage)
