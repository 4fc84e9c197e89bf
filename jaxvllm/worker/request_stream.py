"""`RequestStream`: delivers the outputs of one request to its caller, who may be slower than the engine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput


class RequestStream:
    """An asynchronous iterator over a request's outputs. Leaving it early aborts the request.

    It never holds more than one output: an output that arrives while another waits is joined to it. So a slow caller
    delays no other request, and a caller that has stopped reading costs no more memory than the whole text.
    """

    def __init__(self, request: GenerationRequest):
        self.request_id = request.request_id
        self._kind = request.params.output_kind
        self._abort: Callable[[Exception | None], None] = lambda error: None  # no engine has the request yet
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.warnings: tuple[str, ...] = ()  # of a request that is accepted: what cannot be enforced of it
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._ended = False

    def aborted_by(self, abort: Callable[[Exception | None], None]) -> None:
        """Takes the engine's `abort`, which ends the request and calls `fail` with the error if there is one.

        `abort` must do nothing for a request that has ended, so the stream need not know whether its request has.
        """
        self._abort = abort

    async def accepted(self) -> None:
        """Waits until the engine has queued the request, or raises why it has not. Cancelling it aborts the request."""
        try:
            await asyncio.shield(self._accepted)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    @property
    def is_accepted(self) -> bool:
        """Whether the engine has queued the request."""
        return self._accepted.done()

    def accept(self, warnings: Sequence[str] = ()) -> None:
        """Takes note that the engine has queued the request, and wakes the caller that waits for it.

        A second engine may do so again, which computes a request whose first engine died.
        """
        if not self._accepted.done():
            self.warnings = tuple(warnings)
            self._accepted.set_result(None)

    def put(self, output: RequestOutput) -> None:
        """Adds the next output."""
        if self._waiting is not None and self._kind == RequestOutputKind.DELTA:
            output = _joined(self._waiting, output)
        self._waiting = output
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, after the caller has read the output that waits."""
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # marks the error as seen: asyncio would warn if no caller awaits `accepted`
        self._error = error
        self._arrived.set()

    def abort(self, error: Exception) -> None:
        """Aborts the request, and ends the stream with `error`. Does nothing when the request has ended."""
        self._abort(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._arrived.wait()
        if self._ended:  # another task has closed the stream meanwhile
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
        """Aborts the request unless it has ended. The stream has no outputs afterwards."""
        self._ended = True
        self._arrived.set()
        self._abort(None)

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
        logprobs=_all_logprobs(first.logprobs or (), second.logprobs),
        draft_spans=None if second.draft_spans is None else [*(first.draft_spans or ()), *second.draft_spans],
    )


def _all_logprobs(
    first: Sequence[dict[int, Logprob]], second: list[dict[int, Logprob]] | FlatLogprobs | None
) -> list[dict[int, Logprob]] | FlatLogprobs | None:
    if isinstance(second, FlatLogprobs):
        return FlatLogprobs.of([*first, *second])
    return None if second is None else [*first, *second]
