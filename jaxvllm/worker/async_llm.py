"""`AsyncLLM`: an engine in its own process, for servers and asynchronous notebooks. The names are vLLM's."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Self, cast

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import OverloadedError, ParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.engine.commands import AnyCommand, EngineCommand
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.stats import EngineStats
from jaxvllm.text.bad_words import read_bad_words
from jaxvllm.text.prompts import PromptReader
from jaxvllm.worker import wire
from jaxvllm.worker.engine_client import (
    EngineClient,
    EngineDiedError,
    EngineState,
    EngineUnavailableError,
    FollowedError,
)
from jaxvllm.worker.engine_process import EngineProcess, LocalPlace, Place
from jaxvllm.worker.engine_questions import EngineQuestions
from jaxvllm.worker.observer import Observer, Observers
from jaxvllm.worker.open_requests import OpenRequest
from jaxvllm.worker.queue_limits import QueueLimits
from jaxvllm.worker.readers import Readers
from jaxvllm.worker.request_stream import RequestStream
from jaxvllm.worker.sent_requests import Rescuer, SentRequests

logger = logging.getLogger(__name__)

# The interval of pinging the engine, which answers between steps.
PING_SECONDS = 1.0
# An engine that has left this many seconds of pings unanswered is not responsive.
RESPONSIVE_SECONDS = 4.0
# An engine that does not answer for this long is killed and started again. No step and no reset takes as long.
STUCK_SECONDS = 120.0
# A restarted engine may take STUCK_SECONDS plus this many times its slowest build so far, because it may have lost a
# cache.
BUILD_FACTOR = 10
# The pause before a new start. It doubles after each start that did not make the engine ready.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0


class AsyncLLM(EngineClient):
    """Completes requests in another process, which it starts again when it dies.

    Use it in one event loop:

        async with AsyncLLM(model="demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=20)):
                ...
    """

    def __init__(self, model: str = "demo", **options: Any):
        """Takes the fields of `EngineConfig` as `options`. Nothing starts before `start`."""
        self._setup(EngineConfig.from_options(model=model, **options), QueueLimits())

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        limits: QueueLimits | None = None,
        chat_template: str | None = None,
        place: Place | None = None,
        readers: Readers | None = None,
        rescuer: Rescuer | None = None,
    ) -> Self:
        """Makes one from a config, and from limits to the requests that may wait.

        `chat_template` replaces the model's. `place` says where the process runs; by default it is a child of this
        process. Several engines of a model may share `readers`. When the process ends, `rescuer` is called for each
        open request and says what becomes of it. Without one, all of them fail.
        """
        llm = cls.__new__(cls)
        llm._setup(config, limits or QueueLimits(), place, readers or Readers(chat_template), rescuer)
        return llm

    def _setup(
        self,
        config: EngineConfig,
        limits: QueueLimits,
        place: Place | None = None,
        readers: Readers | None = None,
        rescuer: Rescuer | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self._place = place or LocalPlace()
        self._readers = readers or Readers()
        self._state = EngineState.STARTING
        self._reason = "the engine is starting"  # describes the state for messages
        self.num_starts = 0
        self._stats: EngineStats | None = None  # as of the last pulse
        self._facts: wire.EngineFacts | None = None
        self._reader: PromptReader | None = None
        self._rules: RequestRules | None = None
        self._process: EngineProcess | None = None
        self._observers = Observers()
        self._requests = SentRequests(self._send, self._observers, rescuer)
        self.questions = EngineQuestions()
        self._num_unanswered = 0  # pings since the engine's last message
        self._was_ready = False  # whether the present process has been ready
        self._began = 0.0  # time when the present process was started
        self._build_seconds = 0.0  # duration of the slowest start
        self._started = asyncio.Event()  # set once the state has changed
        self._settled = asyncio.Event()  # set while the state is READY, FAILED or CLOSED
        self._task: asyncio.Task[None] | None = None

    # ---- its lifecycle ----

    def launch(self) -> None:
        assert self._task is None, "launched twice"
        self._task = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        await self._settled.wait()
        if self._state is EngineState.FAILED:
            assert self._task is not None
            await self._task  # raises

    async def started(self) -> None:
        await self._started.wait()

    async def ended(self) -> None:
        assert self._task is not None, "not launched"
        await asyncio.shield(self._task)

    async def close(self) -> None:
        if self._task is not None:
            process = self._process
            if self.config.has_others and process is not None and self._state is EngineState.READY:
                try:
                    await process.stop()  # so that it can end the other processes
                except asyncio.CancelledError:
                    process.kill()
                    raise
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # `ready` and `ended` raise the error
                await self._task
        self._enter(EngineState.CLOSED, "the engine is closed")
        self._observers.tell(lambda observer: observer.on_end())
        error = EngineUnavailableError(self._reason)
        self._requests.fail(error)
        self.questions.fail(error)

    def kill(self) -> None:
        """Kills the engine's process, if there is one."""
        if self._process is not None:
            self._process.kill()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    @property
    def is_responsive(self) -> bool:
        return self._state is EngineState.READY and self._silent_seconds <= RESPONSIVE_SECONDS

    @property
    def _silent_seconds(self) -> float:
        """The time for which the engine has left pings unanswered."""
        # The time is counted in pings and not taken from the clock: this process itself may have been stopped or
        # starved, with the answers unread, or its machine may have slept.
        return self._num_unanswered * PING_SECONDS

    @property
    def is_known(self) -> bool:
        return self._facts is not None

    @property
    def facts(self) -> wire.EngineFacts:
        if self._facts is None:
            raise EngineUnavailableError(self._reason)
        return self._facts

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, or None while there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def max_requests(self) -> int | None:
        return self.limits.most(self.facts.max_num_seqs)

    @property
    def num_requests(self) -> int:
        return len(self._requests.open)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the prompts of requests without an output. Takes O(requests)."""
        return self._requests.open.num_queued_tokens

    def observe(self, observer: Observer) -> None:
        self._observers.listed.append(observer.of_engine(0))

    def observe_as(self, index: int, observer: Observer) -> None:
        """Does the same as `observe` where this is engine number `index` of several."""
        self._observers.listed.append(observer.of_engine(index))

    # ---- requests ----

    @property
    def reader(self) -> PromptReader:
        if self._reader is None:
            raise EngineUnavailableError(self._reason)
        return self._reader

    @property
    def rules(self) -> RequestRules:
        if self._rules is None:
            raise EngineUnavailableError(self._reason)
        return self._rules

    def new_request_id(self) -> str:
        return f"request-{self._requests.open.new_serial()}"

    def has(self, request_id: str) -> bool:
        """Returns whether a request with this id is open."""
        return request_id in self._requests.open

    def enqueue(self, request: GenerationRequest) -> RequestStream:
        self._ready_process()
        self.rules.check(request)
        read_bad_words(request.params.bad_words, self.tokenizer, self.facts.vocab_size)
        request_id = request.request_id
        if request_id in self._requests.open:
            raise ParameterError(f"request id {request_id!r} is in use: choose another", "request_id")
        # The engine checks its limits itself, but only if it answers, and this one may be stuck.
        unanswered = self._requests.open.num_unanswered
        if self.max_requests is not None and unanswered >= self.max_requests:
            raise OverloadedError(f"{unanswered} requests wait for the engine's answer: try again later")
        open_request = OpenRequest(request)
        self._requests.send(open_request)
        return open_request.stream

    def adopt(self, open_request: OpenRequest) -> None:
        """Computes a request of another engine of the same model, or of an earlier process, from its beginning.

        Its caller gets what is new to him. Raises EngineUnavailableError when there is no engine to take it.
        """
        self._ready_process()
        open_request.rewind()
        self._requests.send(open_request)

    def hand_over(self) -> list[OpenRequest]:
        """Ends all open requests here, without telling their callers, and returns them, for another engine."""
        return self._requests.hand_over()

    async def idle(self) -> None:
        """Waits until no request is open."""
        await self._requests.open.idle()

    async def abort(self, request_id: str) -> None:
        self._requests.abort(request_id)

    async def ask[Reply](self, command: EngineCommand[Reply]) -> Reply:
        return cast(Reply, await self.questions.ask(self._ready_process(), cast(AnyCommand, command)))

    # ---- the process ----

    def _send(self, command: wire.Command) -> None:
        """Sends a command to the process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    def _ready_process(self) -> EngineProcess:
        if self._state is not EngineState.READY or self._process is None:
            raise EngineUnavailableError(self._reason)
        return self._process

    async def _supervise(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self._live()
            except Exception as error:
                self._enter(EngineState.FAILED, str(error))
                failed = EngineDiedError("the engine has failed: see the server's log")
                self._requests.rescue(self._requests.open.serials(), failed, none_is_guilty=True)
                self._requests.fail(failed)
                self.questions.fail(failed)
                raise
            # A process that was ready is started again after the shortest pause: the start itself takes time.
            pause = FIRST_PAUSE if self._was_ready else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        """Runs one process of the engine until its end. Raises only if the engine has never been built."""
        self._was_ready, self._num_unanswered, self._began = False, 0, time.monotonic()
        try:
            process = self._process = await self._place.start(self.config, self.limits)
        except OSError as error:  # zmq's errors too: no memory, no processes or no disk space, which may pass
            if self._facts is None:
                raise
            logger.error("the engine's process cannot be started: %s", error)
            return
        self.num_starts += 1
        pinging = asyncio.create_task(self._ping(process))
        try:
            await self._hear(process)
            reason = f"the engine's process {process.end_text()}"
            if self._facts is None:
                raise RuntimeError(f"{reason} before it was ready: see its log above")
            logger.error("%s: it had %d requests, and is started again", reason, self.num_requests)
            self._stats = None
            self._enter(EngineState.RESTARTING, f"{reason}, and is started again")
            died = EngineDiedError(f"{reason} while it worked on this request: send it again")
            self._requests.rescue(self._requests.open.serials(), died, process.is_out_of_reach)
            self.questions.fail(died)
        finally:
            pinging.cancel()
            self._process = None
            self._requests.open.clear_unanswered()
            await process.end()

    async def _ping(self, process: EngineProcess) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self._state is EngineState.READY:
                if self.questions.take_long:
                    continue
                if self._silent_seconds > STUCK_SECONDS:
                    logger.error("the engine has not answered %d pings: it is killed", self._num_unanswered)
                    process.kill()
                self._num_unanswered += 1
                process.send(wire.Ping())
            elif self.is_known and time.monotonic() - self._began > STUCK_SECONDS + BUILD_FACTOR * self._build_seconds:
                logger.error("the engine has not been built again in time: it is killed")
                process.kill()

    async def _hear(self, process: EngineProcess) -> None:
        """Handles the messages of the process until it has ended."""
        while (report := await process.receive()) is not None:
            self._num_unanswered = 0
            self._read(report)

    def _read(self, report: wire.Report) -> None:
        match report:
            case wire.Outputs(outputs):
                for output in outputs:
                    self._requests.deliver(output)
            case wire.Accepted(serial, warnings):
                self._requests.accepted(serial, warnings)
            case wire.Rejected(serial, reason, overloaded, param):
                error = OverloadedError(reason) if overloaded else ParameterError(reason, param)
                self._requests.rejected(serial, error)
            case wire.Pulse(stats, _, started):
                self._stats = stats
                self._requests.started(started)
                self._observers.tell(lambda observer, pulse=report: observer.on_pulse(pulse))  # type: ignore[misc]
            case wire.CommandAnswer():
                self.questions.answer(report)
            case wire.Broken(reason):
                # The engine has not seen the requests that it has not accepted yet. It will take them afterwards.
                failed = EngineDiedError(f"a step of the engine failed ({reason}): send the request again")
                self._requests.rescue(self._requests.open.serials(accepted=True), failed)
                self._requests.send_kept()
            case wire.Lost(serial, reason, unavailable):
                self._requests.lost(serial, (EngineUnavailableError if unavailable else EngineDiedError)(reason))
            case wire.Away(reason):
                self._enter(EngineState.RESTARTING, reason)
            case wire.Ready(facts):
                self._open(facts)
            case wire.Follows():
                self._enter(EngineState.FOLLOWING, "this process computes for process 0 of the engine: ask that one")
            case wire.FollowerEnded():
                raise FollowedError("process 0 of this engine has closed it")
            case wire.Failed(reason, usage):
                if self._facts is None:
                    raise ValueError(reason) if usage else RuntimeError(reason)
                logger.error("the engine could not be started again: %s", reason)

    def _open(self, facts: wire.EngineFacts) -> None:
        if self._reader is None:
            self._reader = self._readers.reader(facts)
        self._facts = facts
        rules = (facts.max_model_len, facts.eos_token_ids, facts.vocab_size, facts.side_inputs)
        self._rules = RequestRules.of(self.config, *rules)
        self._was_ready = True
        self._build_seconds = max(self._build_seconds, time.monotonic() - self._began)
        self._enter(EngineState.READY, "ready")
        if self._process is not None:
            self._repeat(self._process)
        self._requests.send_kept()
        self._observers.tell(lambda observer: observer.on_start(self.num_starts, facts))

    def _repeat(self, process: EngineProcess) -> None:
        """Tells a process that was started again what lasts."""
        self.questions.repeat(process)

    def _enter(self, state: EngineState, reason: str) -> None:
        self._state, self._reason = state, reason
        self._started.set()
        if state in (EngineState.READY, EngineState.FAILED, EngineState.CLOSED):
            self._settled.set()
        else:
            self._settled.clear()
