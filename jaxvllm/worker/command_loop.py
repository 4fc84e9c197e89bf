"""The loop of the engine's process: it executes the client's commands, and steps the engine while it has work."""

import gc
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import zmq

from jaxvllm.core.errors import OverloadedError, ParameterError, UnsupportedParameterError, belongs_to_work
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.burst_pace import SERVING_SECONDS
from jaxvllm.engine.commands import AnyCommand
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.multihost import follow_config
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.startup import uncollected
from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.worker import wire
from jaxvllm.worker.engine_link import Address, connect
from jaxvllm.worker.engine_questions import failed
from jaxvllm.worker.preparing import Preparing
from jaxvllm.worker.queue_limits import QueueLimits

logger = logging.getLogger("jaxvllm.engine")

# The interval of sending counters while there is work. They are also sent when the client asks for them.
PULSE_SECONDS = 0.5
# After so long without a command an engine without work uses the first pause for what would hold up steps later. The
# client's pings come every second.
PAUSE_MILLISECONDS = 250
# The number of steps in a row that may break off before the engine gives up. After each of them it is reset.
MAX_BREAKS = 3
# The time for the last messages to be sent. It ends early when they have been sent, or the client has ended.
LINGER_MILLISECONDS = 10_000


def serve(address: str | Address) -> bool:
    """Builds the engine that the first message describes, and works for the client at `address` until it says stop.

    If the engine cannot be built, it sends the reason and returns. If this is one of several processes and not
    process 0, it has no engine of its own: it follows process 0, and sends a message when that has ended. With an
    `Address`, which may be on another host, this process ends when the connection does.
    Returns whether there are several processes.
    """
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        if isinstance(address, Address):
            connect(socket, address)
        else:
            socket.connect(address)
        start = wire.decode_command(socket.recv())
        assert isinstance(start, wire.Start)
        try:
            if follow_config(start.config, lambda: socket.send(wire.encode(wire.Follows()))):
                socket.send(wire.encode(wire.FollowerEnded()))
                return True
            with uncollected():
                engine = Engine(start.config, SERVING_SECONDS)
                # What tracing has left must not be kept for good. A warm start has little: 5 ms.
                gc.collect()
        except (ValueError, NotImplementedError, OSError, ImportError, MemoryError, RuntimeError) as error:
            logger.debug("the engine could not be built", exc_info=True)
            usage = isinstance(error, ValueError | NotImplementedError | OSError)
            socket.send(wire.encode(wire.Failed(" ".join(str(error).split()) or type(error).__name__, usage)))
        else:
            CommandLoop(engine, start.limits, socket).run()
        return start.config.has_others


class CommandLoop:
    """Executes the client's commands, and steps the engine while it has work.

    What fails at one request ends that request: it cannot be decoded or queued, or its output cannot be sent. The
    constraint and the text of a request keep their failures to the request, too (`GuardedConstraint`,
    `OutputProcessor`). Any other failure of a step, or of an abort, ends all requests, and the engine goes on.
    """

    def __init__(self, engine: Engine, limits: QueueLimits, socket: "zmq.Socket[bytes]"):
        self._engine = engine
        self._limits = limits
        self._socket = socket
        self._pulse_at = 0.0
        self._breaks = 0
        self._serials: dict[str, int] = {}  # of the requests that have not ended
        self._preparing = Preparing()
        self._has_used_pause = False
        self._unscored: set[int] = set()  # serials of requests whose client waits for the prompt's log-probabilities

    def run(self) -> None:
        """Runs until the client says stop. After `MAX_BREAKS` failed steps in a row it raises the last error."""
        self._send(wire.Ready(self._facts()))
        while not self._engine.is_closed:
            self._hear()
            if self._engine.has_work and not self._engine.is_closed:
                self._step()
                if time.monotonic() >= self._pulse_at:
                    self._pulse()

    def _step(self) -> None:
        try:
            results = self._engine.step()
        except BaseException as error:
            self._break(error)
            return
        if results:
            self._breaks = 0  # only now: a step that was launched may still fail when its output is read
            self._tell(results)

    def _break(self, error: BaseException) -> None:
        """Says that all requests have failed, which the engine has dropped. Raises the last of too many errors."""
        if not belongs_to_work(error):
            raise error
        logger.error("a step broke off: its requests have failed", exc_info=error)
        self._serials.clear()
        self._unscored.clear()
        self._send(wire.Broken(type(error).__name__))
        self._breaks += 1
        if self._breaks == MAX_BREAKS:
            raise error

    def _tell(self, results: Sequence[RequestOutput]) -> None:
        """Sends outputs. What cannot be sent ends its request, and the others are sent all the same.

        A request that was aborted has no reader any more.
        """
        told = [(result, self._output(result)) for result in results if result.request_id in self._serials]
        try:
            self._send(wire.Outputs([output for _, output in told]))
        except Exception:
            for result, output in told:
                try:
                    self._send(wire.Outputs([output]))
                except Exception as error:
                    self._serials.pop(result.request_id, None)
                    self._abort(result.request_id)
                    self._lose(output.serial, "has an output that could not be sent", error)

    def _hear(self) -> None:
        """Executes all commands that have arrived. Without other work, it waits for a command or a grammar first."""
        if not self._engine.has_work:
            if self._preparing:
                self._preparing.wait(self._socket)
            else:
                if not self._has_used_pause and not self._socket.poll(PAUSE_MILLISECONDS):
                    self._has_used_pause = True
                    self._engine.use_pause()
                self._obey(self._socket.recv())
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._obey(data)
        for add, grammar in self._preparing.take_ready():
            self._submit(add, grammar)

    def _obey(self, data: bytes) -> None:
        try:
            command = wire.decode_command(data)
        except Exception as error:
            if (serial := wire.serial_of_add(data)) is None:
                raise
            self._lose(serial, "could not be decoded", error)
            return
        match command:
            case wire.Add() as add:
                self._add(add)
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    self._abort(request_id)
                    self._unscored.discard(self._serials.pop(request_id, -1))
                    if (left := self._preparing.discard(request_id)) is not None:
                        self._send(wire.Rejected(left.serial, "the request was aborted", False))
            case wire.Ping():
                self._pulse()
            case wire.Ask(number, asked):
                self._answer(number, asked)
            case wire.Stop():
                self._engine.close()

    def _answer(self, number: int, command: AnyCommand) -> None:
        outputs = self._engine.outputs
        try:
            answer = wire.CommandAnswer.of(number, command.run(self._engine))
            for add in self._preparing.take(command.ends):
                self._end(add)
        except Exception as error:
            if isinstance(error, ValueError | NotImplementedError):
                answer = failed(number, error)
            else:  # such as memory that weights need, and that a device has not
                logger.error("the command %s failed", type(command).__name__, exc_info=error)
                reason = f"{type(command).__name__} failed in the engine ({type(error).__name__})"
                answer = wire.CommandAnswer(number, reason=reason, kind="died")
            if self._engine.outputs is not outputs or self._engine.is_broken:  # a reset drops all requests
                self._break(error)
        self._send(answer)

    def _end(self, add: wire.Add) -> None:
        """Ends a request before its grammar is compiled. Its caller is told what those of all others are."""
        try:
            self._engine.end(add.request)
        except BaseException as error:
            self._refuse(add, error)
        else:
            self._serials[add.request.request_id] = add.serial
            self._send(wire.Accepted(add.serial))

    def _abort(self, request_id: str) -> None:
        try:
            self._engine.abort(request_id)
        except BaseException as error:
            self._break(error)

    def _add(self, add: wire.Add) -> None:
        try:
            grammar = self._engine.inputs.prepare(add.request)
        except BaseException as error:
            self._refuse(add, error)
            return
        if grammar is None or grammar.done():
            self._submit(add, grammar)
        else:
            self._preparing.add(add, grammar)

    def _submit(self, add: wire.Add, grammar: Future[CompiledGrammar] | None) -> None:
        request, n = add.request, add.request.params.num_sequences
        schedulers = [replica.scheduler for replica in self._engine.replicas]
        try:
            self._engine.inputs.check_fits(request)
            self._limits.check(schedulers, n, n * len(request.prompt.token_ids))
            warnings = [] if grammar is None else list(grammar.result().warnings)
            self._engine.submit(request, grammar)
        except BaseException as error:
            self._refuse(add, error)
        else:
            self._serials[request.request_id] = add.serial
            if request.params.prompt_logprobs is not None:
                self._unscored.add(add.serial)
            self._send(wire.Accepted(add.serial, warnings))

    def _refuse(self, add: wire.Add, error: BaseException) -> None:
        """Answers a request that the engine did not take. Raises what is no fault of the request."""
        if isinstance(error, ValueError | NotImplementedError | OverloadedError):
            param = error.param if isinstance(error, ParameterError | UnsupportedParameterError) else None
            self._send(wire.Rejected(add.serial, str(error), isinstance(error, OverloadedError), param))
        elif self._engine.is_broken or not belongs_to_work(error):
            raise error
        else:
            self._lose(add.serial, "could not be queued", error)

    def _lose(self, serial: int, what: str, error: BaseException) -> None:
        """Says that a request has ended because `what` failed at it alone."""
        logger.error("a request %s", what, exc_info=error)
        self._send(wire.Lost(serial, f"this request {what} ({type(error).__name__})"))

    def _output(self, result: RequestOutput) -> wire.Output:
        serial = self._serials.pop(result.request_id) if result.finished else self._serials[result.request_id]
        scores = result.prompt_logprobs if serial in self._unscored else None
        self._unscored.discard(serial)
        return wire.Output.of(serial, result, scores)

    def _pulse(self) -> None:
        self._pulse_at = time.monotonic() + PULSE_SECONDS
        started = [self._serials[name] for name in self._engine.outputs.take_started() if name in self._serials]
        self._send(wire.Pulse(self._engine.stats(), self._engine.take_reports(), started))

    def _send(self, report: wire.Report) -> None:
        self._socket.send(wire.encode(report))

    def _facts(self) -> wire.EngineFacts:
        engine = self._engine
        schedulers = [replica.scheduler for replica in engine.replicas]
        return wire.EngineFacts(
            tokenizer_directory=None if engine.tokenizer_directory is None else str(engine.tokenizer_directory),
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            eos_token_ids=engine.eos_token_ids,
            default_params=replace(engine.defaults.params, output_kind=RequestOutputKind.CUMULATIVE),
            num_replicas=len(schedulers),
            num_pages=sum(scheduler.cache.num_pages for scheduler in schedulers),
            page_size=schedulers[0].cache.page_size,
            max_num_seqs=sum(scheduler.slots.num_slots for scheduler in schedulers),
            default_max_tokens=engine.defaults.max_tokens,
            most_tokens=engine.defaults.most_tokens,
            pooler=engine.pooler,
            side_inputs=engine.side_inputs,
        )
