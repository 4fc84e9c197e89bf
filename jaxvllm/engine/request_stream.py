"""The outputs of one request on their way to its caller, who may be slower than the engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput


class RequestStream:
    """An asynchronous iterator over a request's outputs. To leave it early is to abort the request.

    Never holds more than one output: what comes while the caller is busy is joined to what waits, so that a caller
    who is slow costs nobody anything and one who stopped costs no more than the whole text.
    """

    def __init__(
        self,
        request_id: str,
        kind: RequestOutputKind,
        accepted: asyncio.Future[None],
        abort: Callable[[], object],
    ):
        self.request_id = request_id
        self._accepted = accepted
        self._kind = kind
        self._abort = abort
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._ended = False

    async def accepted(self) -> None:
        """Returns when the engine has queued the request; raises why it has not. A cancelled wait aborts it."""
        try:
            await asyncio.shield(self._accepted)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    def put(self, output: RequestOutput) -> None:
        """Brings the next output."""
        if self._waiting is not None and self._kind == RequestOutputKind.DELTA:
            output = _joined(self._waiting, output)
        self._waiting = output
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, once what waits has been read."""
        self._error = error
        self._arrived.set()

    def abort(self, error: Exception) -> None:
        """Aborts the request, and ends the stream with `error`."""
        if not self._ended and self._error is None:
            self._abort()
            self.fail(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._arrived.wait()
        if self._ended:  # closed meanwhile, by another task
            raise StopAsyncIteration
        output, self._waiting = self._waiting, None
        if output is None:
            self._ended = True
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._arrived.clear()
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        """Aborts the request unless it has ended. Nothing comes afterwards."""
        if not self._ended:
            self._ended = True
            self._arrived.set()
            self._abort()  # does nothing when it has ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    completions = {completion.index: completion for completion in first.outputs}
    for later in second.outputs:
        earlier = completions.get(later.index)
        completions[later.index] = later if earlier is None else _appended(earlier, later)
    outputs = [completions[index] for index in sorted(completions)]
    return replace(second, outputs=outputs, prompt_logprobs=first.prompt_logprobs)


def _appended(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=None if second.logprobs is None else (first.logprobs or []) + second.logprobs,
    )
