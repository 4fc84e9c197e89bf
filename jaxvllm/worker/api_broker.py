"""`ApiBroker`: gives an API process the engines that this process holds, as if it were an engine itself."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import zmq.asyncio

from jaxvllm.core.errors import OverloadedError, ParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.engine.commands import AnyCommand
from jaxvllm.worker import wire
from jaxvllm.worker.engine_client import EngineClient, EngineDiedError, EngineState, EngineUnavailableError
from jaxvllm.worker.engine_questions import COMMAND_ERRORS, failed
from jaxvllm.worker.request_stream import RequestStream

logger = logging.getLogger(__name__)

# How often it looks whether there is an engine.
_LOOK_SECONDS = 0.05


class ApiBroker:
    """Executes the commands of one API process. What it asks is answered like an engine's answers, in `wire`."""

    def __init__(
        self,
        engines: EngineClient,
        socket: zmq.asyncio.Socket,
        count_http: Callable[[wire.CountHttp], None],
        render_metrics: Callable[[], Awaitable[tuple[bytes, str]]],
    ):
        """Passes what the process tells of its answers to `count_http`. `render_metrics` makes the text of metrics."""
        self._engines = engines
        self._socket = socket
        self._count_http = count_http
        self._render_metrics = render_metrics
        self._streams: dict[str, RequestStream] = {}  # by id
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Works until it is cancelled. Then the requests of the process are aborted."""
        self._spawn(self._watch())
        try:
            while True:
                self._obey(wire.decode_command(await self._socket.recv()))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Tells whenever an engine comes, and when there is none any more."""
        was_there = False
        while True:
            is_there = self._engines.state is EngineState.READY
            if is_there != was_there:
                self._send(wire.Ready(self._engines.facts) if is_there else wire.Away(self._engines.reason))
            was_there = is_there
            await asyncio.sleep(_LOOK_SECONDS)

    def _obey(self, command: wire.Command) -> None:
        match command:
            case wire.Add(serial, request):
                self._add(serial, request)
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    if stream := self._streams.get(request_id):
                        self._spawn(stream.aclose())
            case wire.Ping():
                # Engines that do not answer must not look as if they did.
                if self._engines.is_responsive and (stats := self._engines.stats) is not None:
                    self._send(wire.Pulse(stats, []))
            case wire.Ask(number, asked):
                self._spawn(self._ask(number, asked))
            case wire.CountHttp():
                self._count_http(command)
            case wire.ShowMetrics():
                self._spawn(self._show_metrics())
            case _:
                logger.error("an API process asked for %s", type(command).__name__)

    def _add(self, serial: int, request: GenerationRequest) -> None:
        try:
            stream = self._engines.enqueue(request)
        except OverloadedError as error:
            self._send(wire.Rejected(serial, str(error), overloaded=True))
        except ValueError as error:
            self._reject(serial, error)
        except EngineUnavailableError as error:
            self._send(wire.Lost(serial, str(error), unavailable=True))
        else:
            self._streams[request.request_id] = stream
            self._spawn(self._pass_on(serial, stream))

    async def _pass_on(self, serial: int, stream: RequestStream) -> None:
        """Sends the outputs of a request."""
        try:
            async with stream:
                await stream.accepted()
                self._send(wire.Accepted(serial, list(stream.warnings)))
                is_first = True
                async for output in stream:
                    scores = output.prompt_logprobs if is_first else None
                    self._send(wire.Outputs([wire.Output.of(serial, output, scores)]))
                    is_first = False
        except OverloadedError as error:
            self._send(wire.Rejected(serial, str(error), overloaded=True))
        except ValueError as error:
            self._reject(serial, error)
        except (EngineDiedError, EngineUnavailableError) as error:
            self._send(wire.Lost(serial, str(error), isinstance(error, EngineUnavailableError)))
        finally:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def _reject(self, serial: int, error: ValueError) -> None:
        param = error.param if isinstance(error, ParameterError) else None
        self._send(wire.Rejected(serial, str(error), overloaded=False, param=param))

    async def _ask(self, number: int, command: AnyCommand) -> None:
        try:
            answer = wire.CommandAnswer.of(number, await self._engines.ask(command))
        except COMMAND_ERRORS as error:
            answer = failed(number, error)
        self._send(answer)

    async def _show_metrics(self) -> None:
        self._send(wire.MetricsText(*await self._render_metrics()))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, report: wire.Report) -> None:
        self._socket.send(wire.encode(report))
