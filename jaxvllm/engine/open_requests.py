"""The requests of a client that have not ended: what their outputs lack on the wire, and where they go."""

import asyncio
from itertools import count

from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine import wire
from jaxvllm.engine.outputs import Logprob, RequestOutput
from jaxvllm.engine.request_stream import RequestStream


class OpenRequest:
    """One of them."""

    def __init__(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        accepted: asyncio.Future[None],
        stream: RequestStream,
    ):
        self.request_id = request_id
        self.params = params
        self.stream = stream
        self._accepted = accepted
        self._text = text
        self._token_ids = token_ids
        self._scores: list[dict[int, Logprob] | None] | None = None

    @property
    def is_accepted(self) -> bool:
        return self._accepted.done()

    def accept(self) -> None:
        if not self._accepted.done():
            self._accepted.set_result(None)

    def bring(self, output: wire.Output) -> RequestOutput:
        """Hands `output` to the caller, and returns it as that gets it."""
        self._scores = output.prompt_logprobs or self._scores  # they come once
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        brought = RequestOutput(
            request_id=self.request_id,
            prompt=self._text,
            prompt_token_ids=self._token_ids,
            outputs=output.completions,
            finished=output.finished,
            metrics=output.metrics,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs if is_delta else self._scores,
        )
        self.stream.put(brought)
        return brought

    def fail(self, error: Exception) -> None:
        """Tells the caller."""
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # whoever waits gets it; nobody may
        self.stream.fail(error)


class OpenRequests:
    """All of them, by id and by the serial that each has on the wire."""

    def __init__(self) -> None:
        self._serials = count()
        self._requests: dict[int, OpenRequest] = {}
        self._serial_of: dict[str, int] = {}
        # Serials that the engine has neither accepted nor rejected, of who has left too: their messages still wait.
        self._unanswered: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._serial_of

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    def new_serial(self) -> int:
        """One that no request has had."""
        return next(self._serials)

    def add(self, serial: int, request: OpenRequest) -> None:
        self._requests[serial] = request
        self._serial_of[request.request_id] = serial
        self._unanswered.add(serial)

    def get(self, serial: int) -> OpenRequest | None:
        return self._requests.get(serial)

    def serial_of(self, request_id: str) -> int | None:
        return self._serial_of.get(request_id)

    def serials(self, accepted: bool = False) -> list[int]:
        """Of all, or of those that were `accepted`."""
        return [serial for serial, request in self._requests.items() if request.is_accepted or not accepted]

    def answered(self, serial: int) -> None:
        """The engine has said whether it takes the request."""
        self._unanswered.discard(serial)

    def none_is_on_its_way(self) -> None:
        """The engine is gone, and what it was sent."""
        self._unanswered.clear()

    def forget(self, serial: int) -> OpenRequest | None:
        """The request, which has ended; None when it had already."""
        request = self._requests.pop(serial, None)
        if request is not None:
            del self._serial_of[request.request_id]
        return request
