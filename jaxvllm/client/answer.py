"""Asks a server for an answer, shows the answer while it arrives, and measures it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from jaxvllm.client.api import Api
from jaxvllm.client.conversation import Dialogue
from jaxvllm.client.event_stream import StreamChunk, Usage
from jaxvllm.client.screen import Screen


@dataclass(frozen=True)
class Stats:
    """The numbers that `--stats` prints. Times are in seconds from the moment the request was sent."""

    first_token: float | None  # None: there was no token
    last_token: float | None
    usage: Usage | None  # None: the stream was stopped before the server sent it

    def __str__(self) -> str:
        if self.first_token is None or self.last_token is None:
            return "no token"
        parts = [f"first token after {self.first_token * 1000:.0f} ms"]
        if self.usage is not None:
            # The rate is that of the tokens after the first, whose time is a number of its own.
            if self.usage.completion_tokens > 1 and self.last_token > self.first_token:
                rate = (self.usage.completion_tokens - 1) / (self.last_token - self.first_token)
                parts.append(f"{rate:.1f} tokens per second")
            cached = f" ({self.usage.cached_tokens} cached)" if self.usage.cached_tokens else ""
            parts.append(f"{self.usage.prompt_tokens} tokens in{cached}, {self.usage.completion_tokens} out")
        parts.append(f"{self.last_token:.2f} s in all")
        return ", ".join(parts)


class AnswerReader:
    """Reads a stream of chunks. `text` and `stats` are also right when the stream is stopped half way."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._sent = clock()
        self._first: float | None = None
        self._last: float | None = None
        self._usage: Usage | None = None
        self._pieces: list[str] = []
        self.finish_reason: str | None = None

    def read(self, chunks: Iterable[StreamChunk]) -> Iterator[str]:
        """Yields the text piece by piece as it arrives."""
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


@dataclass(frozen=True)
class Asker:
    """Sends a person's messages. Every request has `fields`: the model and the sampling parameters."""

    api: Api
    screen: Screen
    fields: Mapping[str, Any]
    shows_stats: bool = False

    def ask(self, dialogue: Dialogue, text: str) -> None:
        """Prints the answer to `text`, and keeps it. If Ctrl-C stops the answer, it keeps the part that has arrived.

        Raises ServerError when there is no answer, and then keeps nothing. Raises KeyboardInterrupt again.
        """
        body = {**self.fields, **dialogue.request(text), "stream": True, "stream_options": {"include_usage": True}}
        if dialogue.needs_max_tokens and "max_tokens" not in body:
            room = self.api.room_behind(text, body["model"])
            body |= {} if room is None else {"max_tokens": room}
        answer = AnswerReader()
        try:
            with closing(self.api.stream(dialogue.path, body)) as chunks:
                for piece in answer.read(chunks):
                    self.screen.text(piece)
        except KeyboardInterrupt:
            dialogue.keep(text, answer.text)
            raise
        finally:
            self.screen.end()
        dialogue.keep(text, answer.text)
        if answer.finish_reason == "length":
            self.screen.note("(the answer was cut at the limit of its tokens: --max-tokens)")
        if self.shows_stats:
            self.screen.note(str(answer.stats))
