"""Records the times and tokens of one request under load."""

from dataclasses import dataclass

from jaxvllm.client.event_stream import DONE, EventReader, error_text, read_chunk


@dataclass(frozen=True)
class Record:
    """The measurements of one request, in seconds. A failed request has an error and no times."""

    start: float  # time.perf_counter() when it was sent
    queued: float  # time that it waited in this program because of --max-concurrency
    num_prompt_tokens: int
    num_output_tokens: int = 0
    ttft: float = 0.0  # time from sending to the first chunk with a token
    latency: float = 0.0  # time from sending to the last chunk
    itl: tuple[float, ...] = ()  # times between chunks, which have one token, or several when the server joins them
    text: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """The seconds per output token after the first, or None when there is no second token."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output_tokens - 1)


class Recorder:
    """Reads one response and records when its tokens came.

    A chunk with only the message's role, before the first token, does not count as a token. Nor does a last chunk with
    only the finish reason, but it ends the request.
    """

    def __init__(self, start: float, queued: float, num_prompt_tokens: int | None):
        self._start = start
        self._queued = queued
        self._num_prompt_tokens = num_prompt_tokens or 0
        self._num_output_tokens = 0
        self._first = self._token = self._last = start
        self._itl: list[float] = []
        self._texts: list[str] = []
        self._events = EventReader()
        self._is_done = False
        self._status = 0
        self._refusal = b""

    def receive(self, status: int, data: bytes, now: float) -> None:
        """Takes a part of the body. Raises ServerError for an error in the stream."""
        self._status = status
        if status != 200:
            self._refusal += data
            return
        for event in self._events.feed(data):
            if event.data == DONE:
                self._is_done = True
                continue
            chunk = read_chunk(event)
            if chunk.usage is not None:
                self._num_prompt_tokens = chunk.usage.prompt_tokens
                self._num_output_tokens = chunk.usage.completion_tokens
            if chunk.choices and not chunk.choices[0].opens:
                text = chunk.choices[0].new_text
                self._last = now
                if not self._texts:
                    self._first = self._token = now
                elif text or chunk.choices[0].finish_reason is None:
                    self._itl.append(now - self._token)
                    self._token = now
                self._texts.append(text)

    def record(self, error: Exception | None = None) -> Record:
        """Returns the measurements, once the response is complete or has failed."""
        reason = self._failure(error)
        if reason:
            return Record(self._start, self._queued, self._num_prompt_tokens, error=reason)
        return Record(
            self._start,
            self._queued,
            self._num_prompt_tokens,
            # If the server sends no usage, each chunk is counted as one token.
            self._num_output_tokens or len(self._texts),
            self._first - self._start,
            self._last - self._start,
            tuple(self._itl),
            "".join(self._texts),
        )

    def _failure(self, error: Exception | None) -> str:
        if error is not None:
            return str(error) or type(error).__name__
        if self._status != 200:
            return f"the server answers {self._status}: {error_text(self._refusal)}"
        if not self._texts:
            return "the server sent no token: was the request streamed?"
        return "" if self._is_done else "the server ended the stream before it was done"
