"""`SentRequests`: the requests that an engine's process works on, from their sending to their end."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.worker import wire
from jaxvllm.worker.engine_client import EngineDiedError
from jaxvllm.worker.observer import LossReason, Observers
from jaxvllm.worker.open_requests import DivergedError, OpenRequest, OpenRequests

# A request that waits for its engine to be started again fails after this time.
KEPT_SECONDS = 120.0


class Rescue(Enum):
    """The fate of a request whose engine has ended."""

    MOVED = auto()  # another engine works on it
    KEPT = auto()  # its own engine computes it from the beginning, when it is there again
    NONE = auto()  # it fails


# Gets a request, and whether the request may be what has ended the engine.
type Rescuer = Callable[[OpenRequest, bool], Rescue]


class SentRequests:
    """Sends requests to an engine, and sees to it that each one's caller gets its outputs and one end.

    When the engine ends, the rescuer says what becomes of its requests. It tells the observers of outputs and losses.

    open: the requests that have not ended
    """

    def __init__(self, send: Callable[[wire.Command], None], observers: Observers, rescuer: Rescuer | None):
        """Takes the function that sends a command to the engine's process, if there is one."""
        self.open = OpenRequests()
        self._send = send
        self._observers = observers
        self._rescuer = rescuer
        self._kept: dict[int, asyncio.TimerHandle] = {}  # serials of requests that wait for the engine to start again

    def send(self, open_request: OpenRequest) -> None:
        serial = self.open.new_serial()
        self._send(wire.Add(serial, open_request.request))  # comes first: it raises for a text that is no Unicode
        open_request.stream.aborted_by(lambda error: self._abort(serial, error))
        self.open.add(serial, open_request)

    def hand_over(self) -> list[OpenRequest]:
        """Ends all requests here, without telling their callers, and returns them, for another engine."""
        given = [open_request for serial in self.open.serials() if (open_request := self._give(serial))]
        self._send(wire.Abort([one.request.request_id for one in given]))
        return given

    def abort(self, request_id: str) -> None:
        serial = self.open.serial_of(request_id)
        if serial is not None:
            self._abort(serial, EngineDiedError(f"request {request_id!r} was aborted"))

    def accepted(self, serial: int, warnings: Sequence[str]) -> None:
        self.open.answered(serial)
        if request := self.open.get(serial):
            request.stream.accept(warnings)

    def rejected(self, serial: int, error: Exception) -> None:
        self.open.answered(serial)
        self._lose(serial, error)

    def lost(self, serial: int, error: Exception) -> None:
        """Takes note that the engine has ended a request because of an error."""
        self.open.answered(serial)
        self._lose(serial, error, "error")

    def started(self, serials: Iterable[int]) -> None:
        """Takes note that the engine has computed a token of each of these requests."""
        for serial in serials:
            if request := self.open.get(serial):
                request.started()

    def deliver(self, output: wire.Output) -> None:
        """Gives an output of the engine to its caller, or the error that a completion has ended with."""
        failed = [completion for completion in output.completions if completion.finish_reason == "error"]
        if failed:
            reason, param = str(failed[0].stop_reason), failed[0].wrong_param
            error = EngineDiedError(reason) if param is None else ParameterError(reason, param)
            lost = self._lose(output.serial, error, "error")
            if lost is not None and not output.finished:
                self._send(wire.Abort([lost.request_id]))
            return
        find = self.open.forget if output.finished else self.open.get
        request = find(output.serial)
        if request is None:  # it was aborted while this output was in transit
            return
        try:
            delivered = request.deliver(output)
        except DivergedError as error:
            request.stream.fail(EngineDiedError(str(error)))
            self._abort(output.serial, None)
            return
        if delivered is not None:
            self._observers.tell(lambda observer: observer.on_output(delivered, request.request.params))

    def rescue(self, serials: Iterable[int], error: EngineDiedError, none_is_guilty: bool = False) -> None:
        """Has these requests computed elsewhere or later, as the rescuer says. The others fail with `error`."""
        for serial in serials:
            open_request = self.open.get(serial)
            if open_request is None or serial in self._kept:  # the engine that has ended never had the latter
                continue
            match self._rescuer and self._rescuer(open_request, open_request.may_kill and not none_is_guilty):
                case Rescue.MOVED:
                    self._give(serial)
                case Rescue.KEPT:
                    loop = asyncio.get_running_loop()
                    self._kept[serial] = loop.call_later(KEPT_SECONDS, self._give_up, serial, error)
                case _:
                    self._lose(serial, error, "error")

    def send_kept(self) -> None:
        """Gives the engine, which is there again, the requests that waited for it."""
        kept, self._kept = self._kept, {}
        for serial, timer in kept.items():
            timer.cancel()
            # Under a new serial, because outputs of the old one may still be in transit.
            if (open_request := self.open.forget(serial)) is not None:
                open_request.rewind()
                self.send(open_request)

    def fail(self, error: RuntimeError) -> None:
        """Ends all requests with an error, those that wait for the engine too."""
        for timer in self._kept.values():
            timer.cancel()
        for serial in self.open.serials():
            self._lose(serial, error, "error")

    def _give(self, serial: int) -> OpenRequest | None:
        """Forgets a request that another engine takes."""
        given = self.open.forget(serial)
        if given is not None:
            request = given.request
            self._observers.tell(lambda observer: observer.on_loss(request.request_id, request.params, "moved"))
        return given

    def _give_up(self, serial: int, error: EngineDiedError) -> None:
        self._kept.pop(serial, None)
        self._lose(serial, error, "error")

    def _abort(self, serial: int, error: Exception | None) -> None:
        """Ends a request, both for its caller and in the engine."""
        lost = self._lose(serial, error, "abort")
        if lost is not None:
            self._send(wire.Abort([lost.request_id]))

    def _lose(self, serial: int, error: Exception | None, reason: LossReason | None = None) -> GenerationRequest | None:
        """Ends a request without a last output and returns it, or returns None if it has ended already.

        Its caller gets the `error` (None: the caller has left), and the observers get the `reason` (None: the engine
        never took the request).
        """
        # The request is found by its serial: a late caller must not end another request that has its id by then.
        lost = self.open.forget(serial)
        if lost is None:
            return None
        if error is not None:
            lost.stream.fail(error)
        if reason is not None:
            self._observers.tell(
                lambda observer: observer.on_loss(lost.request.request_id, lost.request.params, reason)
            )
        return lost.request
