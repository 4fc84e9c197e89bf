"""`EngineClient`: what a server may ask of engines, whether there is one (`AsyncLLM`) or several (`EnginePool`)."""

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Self, Unpack

from jaxvllm.config import EngineConfig
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.pause import PauseMode, SleepTag
from jaxvllm.core.request import GenerationRequest, RequestOptions
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.commands import (
    CheckSleep,
    EngineCommand,
    PutToSleep,
    ReleaseKV,
    ResetPrefixCache,
    SetPause,
    ShowExpertLoads,
    ShowPages,
    ShowRest,
    WakeUp,
)
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.page_view import PoolView
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.stats import EngineStats
from jaxvllm.text.prompts import PromptLike, PromptReader, PromptRoom
from jaxvllm.text.tokenizer import Tokenizer
from jaxvllm.worker import wire
from jaxvllm.worker.observer import Observer
from jaxvllm.worker.request_stream import RequestStream

# The interval of asking whether the requests that a pause waits for have ended.
SETTLE_SECONDS = 0.02


class EngineState(enum.StrEnum):
    """The state of the engine's process."""

    STARTING = "starting"
    READY = "ready"
    FOLLOWING = "following"  # it computes for process 0 of an engine of several processes, and takes no requests
    RESTARTING = "restarting"
    FAILED = "failed"  # it could not be built, and trying again would not help
    CLOSED = "closed"


class EngineDiedError(RuntimeError):
    """Raised when the engine ended, or a step failed, while it worked on a request that is itself correct."""


class EngineUnavailableError(RuntimeError):
    """Raised when there is no engine at the moment. The caller may try again."""


class FollowedError(RuntimeError):
    """Raised when this process followed process 0 of an engine and took no requests, and process 0 has closed it."""


class EngineClient(ABC):
    """Completes requests in other processes. Use it in one event loop."""

    config: EngineConfig

    # ---- its lifecycle ----

    @abstractmethod
    def launch(self) -> None:
        """Starts the processes of the engines, and starts each again whenever it dies. Returns at once."""

    @abstractmethod
    async def ready(self) -> None:
        """Waits until requests are taken. Raises ValueError or RuntimeError when an engine cannot be built."""

    @abstractmethod
    async def started(self) -> None:
        """Waits for the end of the first start, whatever came of it: requests are taken, or there is no engine here."""

    @abstractmethod
    async def ended(self) -> None:
        """Waits for the final end of an engine and raises its error: it could not be built, or there is a bug here."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all processes. Open requests fail. If this call is cancelled, the processes are killed."""

    async def start(self) -> None:
        """Does `launch` and `ready`."""
        self.launch()
        await self.ready()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ---- its state ----

    @property
    @abstractmethod
    def state(self) -> EngineState: ...

    @property
    @abstractmethod
    def reason(self) -> str:
        """Describes the state for messages."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats | None:
        """The counters and gauges as of the last pulse. None while no engine has sent any."""

    @property
    @abstractmethod
    def is_responsive(self) -> bool:
        """Whether requests are taken and were answered lately: an engine is idle, or its steps make progress."""

    @property
    @abstractmethod
    def is_known(self) -> bool:
        """Whether an engine has sent the facts about its model, so that `facts` and `reader` exist."""

    @property
    @abstractmethod
    def facts(self) -> wire.EngineFacts:
        """The facts about the model and its engines. Raises EngineUnavailableError before one is first ready."""

    @property
    @abstractmethod
    def reader(self) -> PromptReader:
        """The reader of prompts for the model. Raises EngineUnavailableError before an engine is first ready."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.reader.tokenizer

    @property
    @abstractmethod
    def rules(self) -> RequestRules:
        """The engines' rules for requests. Raises EngineUnavailableError before an engine is first ready."""

    @property
    @abstractmethod
    def max_requests(self) -> int | None:
        """The number of requests that may run and wait at once. None means any number."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """The number of requests that have not ended, queued ones included."""

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Calls `observer.of_engine(i)` for all events of engine i from now on."""

    # ---- requests ----

    @abstractmethod
    def new_request_id(self) -> str:
        """Returns an id that no request has."""

    @abstractmethod
    def enqueue(self, request: GenerationRequest) -> RequestStream:
        """Does the same as `submit`, but does not wait for the engine's answer: `RequestStream.accepted` does."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages. Its stream fails. An unknown id is ignored."""

    @abstractmethod
    async def ask[Reply](self, command: EngineCommand[Reply]) -> Reply:
        """Makes the engines do something between two steps, and returns their answer.

        Raises EngineUnavailableError when there is no engine to ask, EngineDiedError when it dies before it answers,
        and the ValueError or NotImplementedError of the command.
        """

    async def pages(self) -> list[PoolView]:
        """Returns the page pool of every replica. Raises the errors of `ask`."""
        return await self.ask(ShowPages())

    async def expert_loads(self) -> dict[int, list[int]]:
        """Returns how many tokens have chosen each expert since the start, by the number of the layer.

        Raises ValueError where nobody counts them, and the errors of `ask`.
        """
        return await self.ask(ShowExpertLoads())

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Makes every replica forget every cached prefix, waits until that is done, and returns True, as vLLM does.

        Running requests keep their pages, or with `reset_running_requests` compute all their tokens again.
        With `reset_connector`, what connectors keep outside of the replicas' pools is forgotten as well.
        Raises the errors of `ask`.
        """
        return await self.ask(ResetPrefixCache(reset_running_requests, reset_connector))

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops computing until `resume`, and waits until no step is under way. Requests that come meanwhile wait.

        abort: open requests end now, with the finish reason `abort`. wait: those that have begun are computed to their
        ends first, and if this call is cancelled, the pause stays. keep: all stay where they are, with their pages, and
        go on after `resume`. Unless requests are kept, `clear_cache` forgets every cached prefix then.
        An engine that is started again is paused, too. Raises the errors of `ask`.
        """
        await self.ask(SetPause(mode))
        while (rest := await self.ask(ShowRest())).is_paused and not rest.is_settled:
            await asyncio.sleep(SETTLE_SECONDS)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Computes again after a `pause`. Raises ValueError while weights or pages sleep, and the errors of `ask`."""
        await self.ask(SetPause(None))

    async def is_paused(self) -> bool:
        """Returns whether all engines are paused. Raises the errors of `ask`."""
        return (await self.ask(ShowRest())).is_paused

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, as `pause` does, and gives back memory of the devices.

        Level 0 gives back none. Level 1 gives back that of KV pages, and that of weights, which go to the host's
        memory; on CPUs they are there already and stay. Level 2 drops the weights. Requests that come meanwhile wait.
        An engine that is started again is paused, and has its memory. Raises the errors of `ask`.
        """
        await self.ask(CheckSleep(level))  # before the pause ends requests
        await self.pause(mode, clear_cache=level > 0)
        await self.ask(PutToSleep(level))

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> bool:
        """Brings back what `tags` name of `weights` and `kv_cache`, or both (None), and returns whether nothing sleeps.

        Then requests are computed again. Weights that level 2 has dropped must be replaced before.
        Raises the errors of `ask`.
        """
        is_awake = await self.ask(WakeUp(None if tags is None else tuple(tags)))
        if is_awake:
            await self.resume()
        return is_awake

    async def is_sleeping(self) -> bool:
        """Returns whether all engines are paused, or any sleeps, as in vLLM. Raises the errors of `ask`."""
        rest = await self.ask(ShowRest())
        return rest.is_paused or bool(rest.sleeping)

    async def release_kv(self) -> None:
        """Frees the memory of KV pages while the engines are paused, until `wake_up(["kv_cache"])`.

        Requests that a pause has kept compute all their tokens again afterwards. Raises the errors of `ask`.
        """
        await self.ask(ReleaseKV())

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
        room = PromptRoom.of(params, is_pooled=options.get("pooling") is not None)
        read = self.reader.read(prompt, room=room)
        if request_id is None:
            request_id = self.new_request_id()
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
