"""`AsyncLLM`: an engine in its own process, for servers and asynchronous notebooks. The names are vLLM's."""

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, Self, Unpack

from jaxvllm.config import EngineConfig
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest, RequestOptions
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.page_view import PoolView
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.stats import EngineStats
from jaxvllm.text.bad_words import read_bad_words
from jaxvllm.text.prompts import PromptLike, PromptReader, PromptRoom
from jaxvllm.text.tokenizer import Tokenizer
from jaxvllm.worker import wire
from jaxvllm.worker.engine_process import EngineProcess
from jaxvllm.worker.observer import LossReason, Observer
from jaxvllm.worker.open_requests import OpenRequest, OpenRequests
from jaxvllm.worker.queue_limits import OverloadedError, QueueLimits
from jaxvllm.worker.request_stream import RequestStream

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


class EngineState(enum.StrEnum):
    """The state of the engine's process."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # it could not be built, and trying again would not help
    CLOSED = "closed"


class EngineDiedError(RuntimeError):
    """Raised when the engine ended, or a step failed, while it worked on a request that is itself correct."""


class EngineUnavailableError(RuntimeError):
    """Raised when there is no engine at the moment. The caller may try again."""


class FollowedError(RuntimeError):
    """Raised when this process followed process 0 of an engine and took no requests, and process 0 has closed it."""


class AsyncLLM:
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
        cls, config: EngineConfig, limits: QueueLimits | None = None, chat_template: str | None = None
    ) -> Self:
        """Makes one from a config, from limits to the requests that may wait, and from a template that replaces the
        model's."""
        llm = cls.__new__(cls)
        llm._setup(config, limits or QueueLimits(), chat_template)
        return llm

    def _setup(self, config: EngineConfig, limits: QueueLimits, chat_template: str | None = None) -> None:
        self.config = config
        self.limits = limits
        self._chat_template = chat_template
        self.state = EngineState.STARTING
        self.reason = "the engine is starting"  # describes the state for messages
        self.num_starts = 0
        self.stats: EngineStats | None = None  # as of the last pulse
        self._facts: wire.EngineFacts | None = None
        self._reader: PromptReader | None = None
        self._rules: RequestRules | None = None
        self._process: EngineProcess | None = None
        self._requests = OpenRequests()
        self._observers: list[Observer] = []
        self._pools: asyncio.Future[list[PoolView]] | None = None
        self._resets: deque[asyncio.Future[None]] = deque()  # of the prefix cache, not yet answered by the engine
        self._num_unanswered = 0  # pings since the engine's last message
        self._was_ready = False  # whether the present process has been ready
        self._began = 0.0  # time when the present process was started
        self._build_seconds = 0.0  # duration of the slowest start
        self._settled = asyncio.Event()  # set while the state is READY, FAILED or CLOSED
        self._task: asyncio.Task[None] | None = None

    # ---- its lifecycle ----

    def launch(self) -> None:
        """Starts the engine's process, and starts it again whenever it dies. Returns at once."""
        assert self._task is None, "launched twice"
        self._task = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        """Waits until the engine takes requests. Raises ValueError or RuntimeError when it cannot be built."""
        await self._settled.wait()
        if self.state is EngineState.FAILED:
            assert self._task is not None
            await self._task  # raises

    async def ended(self) -> None:
        """Waits for the final end of the engine and raises its error: it could not be built, or there is a bug here."""
        assert self._task is not None, "not launched"
        await asyncio.shield(self._task)

    async def start(self) -> None:
        """Does `launch` and `ready`."""
        self.launch()
        await self.ready()

    async def close(self) -> None:
        """Ends the engine's process. Its open requests fail. If this call is cancelled, the process is killed."""
        if self._task is not None:
            process = self._process
            if self.config.has_others and process is not None and self.state is EngineState.READY:
                try:
                    await process.stop()  # so that it can end the other processes
                except asyncio.CancelledError:
                    process.kill()
                    raise
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # `ready` and `ended` raise the error
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
        """The time for which the engine has left pings unanswered."""
        # The time is counted in pings and not taken from the clock: this process itself may have been stopped or
        # starved, with the answers unread, or its machine may have slept.
        return self._num_unanswered * PING_SECONDS

    @property
    def is_known(self) -> bool:
        """Whether the engine has sent the facts about its model, so that `facts` and `reader` exist."""
        return self._facts is not None

    @property
    def facts(self) -> wire.EngineFacts:
        """The facts about the engine's model. Raises EngineUnavailableError before it is first ready."""
        if self._facts is None:
            raise EngineUnavailableError(self.reason)
        return self._facts

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, or None while there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def max_requests(self) -> int | None:
        """The number of requests that may run and wait at once. None means any number."""
        return self.limits.most(self.facts.max_num_seqs)

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended, queued ones included."""
        return len(self._requests)

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for all events from now on."""
        self._observers.append(observer)

    # ---- requests ----

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.reader.tokenizer

    @property
    def reader(self) -> PromptReader:
        """The reader of prompts for the model. Raises EngineUnavailableError before the engine is first ready."""
        if self._reader is None:
            raise EngineUnavailableError(self.reason)
        return self._reader

    @property
    def rules(self) -> RequestRules:
        """The engine's rules for requests. Raises EngineUnavailableError before the engine is first ready."""
        if self._rules is None:
            raise EngineUnavailableError(self.reason)
        return self._rules

    def make_request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationRequest:
        """Makes a request for `enqueue`. Raises ValueError when something is wrong with the prompt.

        By default it has the parameters that the model's checkpoint recommends, and a unique id. `options` are the
        optional fields of `GenerationRequest`, such as `priority`.
        """
        params = self.facts.default_params if sampling_params is None else sampling_params
        read = self.reader.read(prompt, room=PromptRoom.of(params))
        if request_id is None:
            request_id = f"request-{self._requests.new_serial()}"
        return GenerationRequest(request_id, read, params, **options)

    async def submit(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Queues a request and returns the stream of its outputs. Arguments are those of `make_request`.

        Raises ValueError when something is wrong with the request, OverloadedError when too many wait,
        EngineUnavailableError when there is no engine to take it, and EngineDiedError when the engine dies before it
        answers. Then nothing is queued.
        """
        stream = self.enqueue(self.make_request(prompt, sampling_params, request_id, **options))
        await stream.accepted()
        return stream

    def enqueue(self, request: GenerationRequest) -> RequestStream:
        """Does the same as `submit`, but does not wait for the engine's answer: `RequestStream.accepted` does."""
        process = self._ready_process()
        self.rules.check(request)
        read_bad_words(request.params.bad_words, self.tokenizer, self.facts.vocab_size)
        request_id = request.request_id
        if request_id in self._requests:
            raise ParameterError(f"request id {request_id!r} is in use: choose another", "request_id")
        # The engine checks its limits itself, but only if it answers, and this one may be stuck.
        unanswered = self._requests.num_unanswered
        if self.max_requests is not None and unanswered >= self.max_requests:
            raise OverloadedError(f"{unanswered} requests wait for the engine's answer: try again later")
        serial = self._requests.new_serial()
        process.send(wire.Add(serial, request))  # this comes first: it raises for a text that is not valid Unicode
        stream = RequestStream(request, lambda error: self._abort(serial, error))
        self._requests.add(serial, OpenRequest(request, stream))
        return stream

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Completes one prompt and yields its outputs in the form of `output_kind`. The rest is as for `submit`."""
        async with await self.submit(prompt, sampling_params, request_id, **options) as stream:
            async for output in stream:
                yield output

    async def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Searches for the most likely continuations of a prompt, and yields one output that has them, best first.

        `sampling_params` say what the output contains, such as log-probabilities, and how the prompt is read.
        """
        like = sampling_params or SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
        sampling = params.sampling_params(like)
        async for output in self.generate(prompt, sampling, request_id, beam_search=params, priority=priority):
            yield output

    async def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages. Its stream fails. An unknown id is ignored."""
        serial = self._requests.serial_of(request_id)
        if serial is not None:
            self._abort(serial, EngineDiedError(f"request {request_id!r} was aborted"))

    async def pages(self) -> list[PoolView]:
        """Returns the page pool of every replica. Raises EngineUnavailableError when there is no engine to ask."""
        process = self._ready_process()
        if self._pools is None:
            self._pools = asyncio.get_running_loop().create_future()
            process.send(wire.ShowPages())
        return await asyncio.shield(self._pools)

    async def reset_prefix_cache(self) -> None:
        """Makes every replica forget every cached prefix, and waits until that is done. Running requests continue.

        Raises EngineUnavailableError when there is no engine to ask, EngineDiedError when it dies before it answers.
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
            # A process that was ready is started again after the shortest pause: the start itself takes time.
            pause = FIRST_PAUSE if self._was_ready else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        """Runs one process of the engine until its end. Raises only if the engine has never been built."""
        self._was_ready, self._num_unanswered, self._began = False, 0, time.monotonic()
        try:
            process = self._process = await EngineProcess.start(self.config, self.limits)
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
            logger.error("%s: %d requests fail, and it is started again", reason, len(self._requests))
            self.stats = None
            self._enter(EngineState.RESTARTING, f"{reason}, and is started again")
            self._fail_all(EngineDiedError(f"{reason} while it worked on this request: send it again"))
        finally:
            pinging.cancel()
            self._process = None
            self._requests.clear_unanswered()
            await process.end()

    async def _ping(self, process: EngineProcess) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self.state is EngineState.READY:
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
            match report:
                case wire.Outputs(outputs):
                    for output in outputs:
                        self._deliver(output)
                case wire.Accepted(serial, warnings):
                    self._requests.answered(serial)
                    if request := self._requests.get(serial):
                        request.stream.accept(warnings)
                case wire.Rejected(serial, reason, overloaded, param):
                    self._requests.answered(serial)
                    self._lose(serial, OverloadedError(reason) if overloaded else ParameterError(reason, param))
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
                    # The engine has not seen the requests that it has not accepted yet. It will take them afterwards.
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
            if tokenizer is not None and self._chat_template is not None:
                tokenizer = tokenizer.with_chat_template(self._chat_template)
            self._reader = PromptReader(tokenizer, facts.vocab_size, facts.max_model_len)
        self._facts = facts
        self._rules = RequestRules.of(self.config, facts.max_model_len, facts.eos_token_ids, facts.vocab_size)
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

    def _deliver(self, output: wire.Output) -> None:
        failed = [completion for completion in output.completions if completion.finish_reason == "error"]
        if failed:
            lost = self._lose(output.serial, EngineDiedError(str(failed[0].stop_reason)), "error")
            if lost is not None and not output.finished and self._process is not None:
                self._process.send(wire.Abort([lost.request_id]))
            return
        find = self._requests.forget if output.finished else self._requests.get
        request = find(output.serial)
        if request is not None:  # otherwise it was aborted while this output was in transit
            delivered = request.deliver(output)
            self._tell(lambda observer: observer.on_output(delivered, request.request.params))

    def _lose(self, serial: int, error: Exception | None, reason: LossReason | None = None) -> GenerationRequest | None:
        """Ends a request without a last output and returns it, or returns None if it has ended already.

        Its caller gets the `error` (None: the caller has left), and the observers get the `reason` (None: the engine
        never took the request).
        """
        # The request is found by its serial: a late caller must not end another request that has its id by then.
        lost = self._requests.forget(serial)
        if lost is None:
            return None
        if error is not None:
            lost.stream.fail(error)
        if reason is not None:
            self._tell(lambda observer: observer.on_loss(lost.request.request_id, lost.request.params, reason))
        return lost.request

    def _abort(self, serial: int, error: Exception | None) -> None:
        """Ends a request, both for its caller and in the engine."""
        lost = self._lose(serial, error, "abort")
        if lost is not None and self._process is not None:
            self._process.send(wire.Abort([lost.request_id]))

    def _fail(self, serials: Iterable[int], error: RuntimeError) -> None:
        for serial in serials:
            self._lose(serial, error, "error")

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
            except Exception:  # an observer's error must not end the engine that it watches
                logger.exception("an observer of the engine failed")
