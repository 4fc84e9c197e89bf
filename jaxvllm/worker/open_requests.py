"""The requests of a client that have not ended. They complete the outputs from the wire and pass them to streams."""

from itertools import count

from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import FlatLogprobs, Logprob, RequestOutput
from jaxvllm.worker import wire
from jaxvllm.worker.request_stream import RequestStream


class OpenRequest:
    """A request that has not ended, with the stream for its outputs."""

    def __init__(self, request: GenerationRequest, stream: RequestStream):
        self.request = request
        self.stream = stream
        self._scores: list[dict[int, Logprob] | None] | FlatLogprobs | None = None

    def deliver(self, output: wire.Output) -> RequestOutput:
        """Completes `output` with what the wire leaves out, puts it into the stream, and returns it."""
        self._scores = output.prompt_logprobs or self._scores  # the engine sends them once
        is_delta = self.request.params.output_kind is RequestOutputKind.DELTA
        delivered = RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt.text,
            prompt_token_ids=self.request.prompt.token_list,
            outputs=output.completions,
            finished=output.finished,
            metrics=output.metrics,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs if is_delta else self._scores,
            kv_transfer_params=output.kv_transfer_params,
            warnings=output.warnings,
        )
        self.stream.put(delivered)
        return delivered


class OpenRequests:
    """The requests of a client that have not ended, by id and by the serial that each has on the wire.

    A request ends when it leaves this table, and `forget` returns it to only one caller. So its end is reported once,
    even if a last output, an abort, a timeout and the end of the engine coincide.
    """

    def __init__(self) -> None:
        self._serials = count()
        self._requests: dict[int, OpenRequest] = {}
        self._serial_of: dict[str, int] = {}
        # Serials that the engine has neither accepted nor rejected. They include requests whose caller has left: their
        # messages still wait for the engine.
        self._unanswered: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._serial_of

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    def new_serial(self) -> int:
        """Returns a serial that no request has had."""
        return next(self._serials)

    def add(self, serial: int, request: OpenRequest) -> None:
        self._requests[serial] = request
        self._serial_of[request.request.request_id] = serial
        self._unanswered.add(serial)

    def get(self, serial: int) -> OpenRequest | None:
        return self._requests.get(serial)

    def serial_of(self, request_id: str) -> int | None:
        return self._serial_of.get(request_id)

    def serials(self, accepted: bool = False) -> list[int]:
        """Returns the serials of all requests, or only of those that the engine has `accepted`."""
        return [serial for serial, request in self._requests.items() if request.stream.is_accepted or not accepted]

    def answered(self, serial: int) -> None:
        """Takes note that the engine has accepted or rejected the request."""
        self._unanswered.discard(serial)

    def clear_unanswered(self) -> None:
        """Takes note that the engine has ended, so that it will not answer the requests that it was sent."""
        self._unanswered.clear()

    def forget(self, serial: int) -> OpenRequest | None:
        """Removes and returns a request that ends, or returns None when it had ended already."""
        request = self._requests.pop(serial, None)
        if request is not None:
            del self._serial_of[request.request.request_id]
        return request
