"""`AsyncLLM`: an engine in a process of its own, for servers and for notebooks that await; the names are vLLM's."""

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, Self

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine import wire
from jaxvllm.engine.admission import OverloadedError, QueueLimits
from jaxvllm.engine.engine_process import EngineProcess
from jaxvllm.engine.observer import Observer
from jaxvllm.engine.open_requests import OpenRequest, OpenRequests
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.page_view import PoolView
from jaxvllm.engine.prompts import Prompt, PromptLike, PromptReader
from jaxvllm.engine.request_stream import RequestStream
from jaxvllm.engine.stats import EngineStats
from jaxvllm.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# The engine is pinged this often. It answers between steps.
PING_SECONDS = 1.0
# An engine that has left this many seconds of pings unanswered is not responsive.
RESPONSIVE_SECONDS = 4.0
# An engine that does not answer for so long is ended and started again. No step and no reset takes as long.
STUCK_SECONDS = 120.0
# One that is started again may build for that and so many times what it ever took: a cache may be lost.
BUILD_FACTOR = 10
# Before a new start; twice as long after each that came to nothing.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0


class EngineState(enum.StrEnum):
    """Where the engine's process is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # it could not be built: that will not change
    CLOSED = "closed"


class EngineDiedError(RuntimeError):
    """The engine ended, or gave up a step, while it worked on this request. Nothing is wrong with the request."""


class EngineUnavailableError(RuntimeError):
    """There is no engine at the moment: ask again."""


class FollowedError(RuntimeError):
    """This was not process 0 of an engine over several, and took no requests; that one has closed it."""


class AsyncLLM:
    """Completes requests in another process, which is started again when it dies.

    Use it in one event loop:

        async with AsyncLLM(model="demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=20)):
                ...
    """

    def __init__(self, model: str = "demo", **options: Any):
        """`options` are the fields of `EngineConfig`. Nothing starts before `start`."""
        self._setup(EngineConfig.from_options(model=model, **options), QueueLimits())

    @classmethod
    def from_config(cls, config: EngineConfig, limits: QueueLimits | None = None) -> Self:
        """The same from a config, and with limits to what may wait."""
        llm = cls.__new__(cls)
        llm._setup(config, limits or QueueLimits())
        return llm

    def _setup(self, config: EngineConfig, limits: QueueLimits) -> None:
        self.config = config
        self.limits = limits
        self.state = EngineState.STARTING
        self.reason = "the engine is starting"  # of the state, for people
        self.num_starts = 0
        self.stats: EngineStats | None = None  # as of the last pulse
        self._facts: wire.EngineFacts | None = None
        self._reader: PromptReader | None = None
        self._process: EngineProcess | None = None
        self._requests = OpenRequests()
        self._observers: list[Observer] = []
        self._pools: asyncio.Future[list[PoolView]] | None = None
        self._resets: deque[asyncio.Future[None]] = deque()  # of the prefix cache, that the engine has not answered
        self._num_unanswered = 0  # pings since the engine's last word
        self._was_ready = False  # in the present life
        self._began = 0.0  # the present life
        self._build_seconds = 0.0  # of the slowest start
        self._settled = asyncio.Event()  # the state is READY, FAILED or CLOSED
        self._task: asyncio.Task[None] | None = None

    # ---- its life ----

    def launch(self) -> None:
        """Starts the engine's process, and starts it again whenever it dies. Returns at once."""
        assert self._task is None, "launched twice"
        self._task = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        """Returns when the engine takes requests. ValueError or RuntimeError when it cannot be built."""
        await self._settled.wait()
        if self.state is EngineState.FAILED:
            assert self._task is not None
            await self._task  # raises

    async def ended(self) -> None:
        """Raises what has ended the engine for good: it could not be built, or this class has a bug."""
        assert self._task is not None, "not launched"
        await asyncio.shield(self._task)

    async def start(self) -> None:
        """`launch` and `ready`."""
        self.launch()
        await self.ready()

    async def close(self) -> None:
        """Ends the engine's process. Requests that it works on fail. If this is cancelled, the process is killed."""
        if self._task is not None:
            process = self._process
            if self.config.has_others and process is not None and self.state is EngineState.READY:
                try:
                    await process.stop()  # the other processes must hear of it
                except asyncio.CancelledError:
                    process.kill()
                    raise
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # `ready` and `ended` tell
                await self._task
        self._enter(EngineState.CLOSED, "the engine is closed")
        self._fail_all(EngineUnavailableError(self.reason))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def is_responsive(self) -> bool:
        """Whether the engine takes requests and has answered lately: it is idle, or its steps make progress."""
        return self.state is EngineState.READY and self._silent_seconds <= RESPONSIVE_SECONDS

    @property
    def _silent_seconds(self) -> float:
        """How long the engine has owed an answer."""
        # Counted in pings, not taken from the clock: this process may have been stopped or starved itself, with the
        # answers unread, or its machine may have slept.
        return self._num_unanswered * PING_SECONDS

    @property
    def is_known(self) -> bool:
        """Whether the engine has told of its model: `facts` and `reader` are there."""
        return self._facts is not None

    @property
    def facts(self) -> wire.EngineFacts:
        """What the engine told of its model. EngineUnavailableError before it was ready for the first time."""
        if self._facts is None:
            raise EngineUnavailableError(self.reason)
        return self._facts

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def max_requests(self) -> int | None:
        """Requests that may run and wait at once; None: any number."""
        return self.limits.most(self.facts.max_num_seqs)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, queued ones included."""
        return len(self._requests)

    def observe(self, observer: Observer) -> None:
        """Tells `observer` from now on."""
        self._observers.append(observer)

    # ---- requests ----

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.reader.tokenizer

    @property
    def reader(self) -> PromptReader:
        """Turns prompts into token ids. EngineUnavailableError before the engine was ready for the first time."""
        if self._reader is None:
            raise EngineUnavailableError(self.reason)
        return self._reader

    async def submit(
        self,
        prompt: PromptLike | Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> RequestStream:
        """Queues a request and returns its outputs to come.

        ValueError when something is wrong with it, OverloadedError when too many wait, EngineUnavailableError when
        there is no engine to take it, EngineDiedError when that dies before it could answer. Nothing is queued then.
        """
        stream = self.enqueue(prompt, sampling_params, request_id, priority=priority)
        await stream.accepted()
        return stream

    def enqueue(
        self,
        prompt: PromptLike | Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> RequestStream:
        """The same without waiting for the engine's word, which `RequestStream.accepted` brings."""
        params = self.facts.default_params if sampling_params is None else sampling_params
        if not isinstance(prompt, Prompt):
            prompt = self.reader.read(prompt, scores_only=params.scores_only)
        serial = self._requests.new_serial()
        if request_id is None:
            request_id = f"request-{serial}"
        process = self._ready_process()
        if request_id in self._requests:
            raise ParameterError(f"request id {request_id!r} is in use: choose another", "request_id")
        # Its own limit needs an engine that answers, and this one may be stuck.
        unanswered = self._requests.num_unanswered
        if self.max_requests is not None and unanswered >= self.max_requests:
            raise OverloadedError(f"{unanswered} requests wait for the engine's answer: try again later")
        # First the message, which may refuse a text that is none.
        token_ids = prompt.token_ids.tolist()
        process.send(wire.Add(serial, request_id, token_ids, params, priority, prompt.cache_salt))
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = RequestStream(request_id, params.output_kind, accepted, lambda: self._abort(serial))
        self._requests.add(serial, OpenRequest(request_id, prompt.text, token_ids, params, accepted, stream))
        return stream

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Completes one prompt and yields its outputs, as `output_kind` asks. Errors are those of `submit`."""
        async with await self.submit(prompt, sampling_params, request_id, priority=priority) as stream:
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages; its stream fails. Unknown ones are ignored."""
        serial = self._requests.serial_of(request_id)
        if serial is not None and (request := self._abort(serial)):
            request.fail(EngineDiedError(f"request {request_id!r} was aborted"))

    async def pages(self) -> list[PoolView]:
        """The page pool of every replica. EngineUnavailableError when there is no engine to ask."""
        process = self._ready_process()
        if self._pools is None:
            self._pools = asyncio.get_running_loop().create_future()
            process.send(wire.ShowPages())
        return await asyncio.shield(self._pools)

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix of every replica, and returns when that is done; running requests go on.

        EngineUnavailableError when there is no engine to ask, EngineDiedError when it dies before it answers.
        """
        self._ready_process().send(wire.ResetPrefixCache())
        reset: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets.append(reset)
        await asyncio.shield(reset)  # a caller that gives up must not take another caller's answer

    # ---- the process ----

    def _ready_process(self) -> EngineProcess:
        if self.state is not EngineState.READY or self._process is None:
            raise EngineUnavailableError(self.reason)
        return self._process

    async def _supervise(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self._live()
            except Exception as error:
                self._enter(EngineState.FAILED, str(error))
                self._fail_all(EngineDiedError("the engine has failed: see the server's log"))
                raise
            # What becomes ready is started again at once: the start itself takes its time.
            pause = FIRST_PAUSE if self._was_ready else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        """One life of the engine's process. Raises what ends all lives: it could not be built in the first place."""
        self._was_ready, self._num_unanswered, self._began = False, 0, time.monotonic()
        try:
            process = self._process = await EngineProcess.start(self.config, self.limits)
        except OSError as error:  # zmq's are too: no memory, no processes, no room. That may pass
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
            logger.error("%s: %d requests fail, and it is started again", reason, len(self._requests))
            self.stats = None
            self._enter(EngineState.RESTARTING, f"{reason}, and is started again")
            self._fail_all(EngineDiedError(f"{reason} while it worked on this request: send it again"))
        finally:
            pinging.cancel()
            self._process = None
            self._requests.none_is_on_its_way()
            await process.end()

    async def _ping(self, process: EngineProcess) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self.state is EngineState.READY:
                if self._silent_seconds > STUCK_SECONDS:
                    logger.error("the engine has not answered %d pings: it is ended", self._num_unanswered)
                    process.kill()
                self._num_unanswered += 1
                process.send(wire.Ping())
            elif self.is_known and time.monotonic() - self._began > STUCK_SECONDS + BUILD_FACTOR * self._build_seconds:
                logger.error("the engine has not been built again in time: it is ended")
                process.kill()

    async def _hear(self, process: EngineProcess) -> None:
        """Does what the process tells until it has ended."""
        while (report := await process.receive()) is not None:
            self._num_unanswered = 0
            match report:
                case wire.Outputs(outputs):
                    for output in outputs:
                        self._bring(output)
                case wire.Accepted(serial):
                    self._requests.answered(serial)
                    if request := self._requests.get(serial):
                        request.accept()
                case wire.Rejected(serial, reason, overloaded, param):
                    self._requests.answered(serial)
                    if request := self._requests.forget(serial):
                        request.fail(OverloadedError(reason) if overloaded else ParameterError(reason, param))
                case wire.Pulse(stats):
                    self.stats = stats
                    self._tell(lambda observer, pulse=report: observer.on_pulse(pulse))  # type: ignore[misc]
                case wire.Pages(pools):
                    if self._pools is not None:
                        self._pools.set_result(pools)
                        self._pools = None
                case wire.PrefixCacheReset():
                    self._resets.popleft().set_result(None)
                case wire.Broken(reason):
                    # What it has not accepted yet it has not seen, and will take after this.
                    error = EngineDiedError(f"a step of the engine failed ({reason}): send the request again")
                    self._fail(self._requests.serials(accepted=True), error)
                case wire.Ready(facts):
                    self._open(facts)
                case wire.Followed():
                    raise FollowedError("process 0 of this engine has closed it")
                case wire.Failed(reason, usage):
                    if self._facts is None:
                        raise ValueError(reason) if usage else RuntimeError(reason)
                    logger.error("the engine could not be started again: %s", reason)

    def _open(self, facts: wire.EngineFacts) -> None:
        if self._reader is None:
            directory = facts.tokenizer_directory
            tokenizer = None if directory is None else Tokenizer.from_directory(directory)
            self._reader = PromptReader(tokenizer, facts.vocab_size, facts.max_model_len)
        self._facts = facts
        self._was_ready = True
        self._build_seconds = max(self._build_seconds, time.monotonic() - self._began)
        self._enter(EngineState.READY, "ready")
        self._tell(lambda observer: observer.on_start(self.num_starts, facts))

    def _enter(self, state: EngineState, reason: str) -> None:
        self.state, self.reason = state, reason
        if state in (EngineState.STARTING, EngineState.RESTARTING):
            self._settled.clear()
        else:
            self._settled.set()

    def _bring(self, output: wire.Output) -> None:
        find = self._requests.forget if output.finished else self._requests.get
        request = find(output.serial)
        if request is not None:  # it was aborted while this was on its way
            brought = request.bring(output)
            self._tell(lambda observer: observer.on_output(brought, request.params))

    def _abort(self, serial: int) -> OpenRequest | None:
        # By its serial: whoever reads the last output late must not end another request that has its id by then.
        if request := self._requests.forget(serial):
            if self._process is not None:
                self._process.send(wire.Abort([request.request_id]))
            self._tell(lambda observer: observer.on_loss(request.request_id, request.params, "abort"))
        return request

    def _fail(self, serials: Iterable[int], error: RuntimeError) -> None:
        for serial in serials:
            if request := self._requests.forget(serial):
                request.fail(error)
                self._tell(
                    lambda observer, lost=request: observer.on_loss(lost.request_id, lost.params, "error")  # type: ignore[misc]
                )

    def _fail_all(self, error: RuntimeError) -> None:
        self._fail(self._requests.serials(), error)
        pending: list[asyncio.Future[Any]] = [*self._resets]
        if self._pools is not None:
            pending.append(self._pools)
        for future in pending:
            future.set_exception(error)
            future.exception()  # marks it as seen: the caller may have left
        self._pools = None
        self._resets.clear()

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:  # who only watches must not end what it watches
                logger.exception("an observer of the engine failed")
