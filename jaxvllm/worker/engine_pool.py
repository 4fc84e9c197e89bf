"""`EnginePool`: several equal engines, each in its own process, behind one client. One of them may die."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol, cast

import msgspec

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.engine.commands import AnyCommand, EngineCommand
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.stats import EngineStats
from jaxvllm.text.prompts import PromptReader
from jaxvllm.worker import wire
from jaxvllm.worker.async_llm import LONGEST_PAUSE, AsyncLLM
from jaxvllm.worker.engine_client import EngineClient, EngineState, EngineUnavailableError
from jaxvllm.worker.engine_process import Place
from jaxvllm.worker.member_choice import Member, MemberChoice
from jaxvllm.worker.observer import Observer
from jaxvllm.worker.open_requests import OpenRequest
from jaxvllm.worker.queue_limits import QueueLimits
from jaxvllm.worker.readers import Readers
from jaxvllm.worker.request_stream import RequestStream
from jaxvllm.worker.sent_requests import Rescue

logger = logging.getLogger(__name__)

# A request whose engine died is computed again this many times. After that it may be what kills them.
MOST_RESCUES = 1


class ScalingError(RuntimeError):
    """Raised when the number of engines is to change while it is changing already."""


class Places(Protocol):
    """The places at which the engines of a pool run."""

    def place(self, rank: int) -> Place:
        """Returns the place of engine number `rank`. Raises ValueError when there can be none."""

    async def close(self) -> None:
        """Frees what the places share. No engine runs any more."""
        return


class Starts(Observer):
    """Tells the starts of engines."""

    def __init__(self, tell: Callable[[int], None], rank: int = 0):
        self._tell = tell
        self._rank = rank

    def of_engine(self, index: int) -> "Starts":
        """Implements `Observer.of_engine`."""
        return Starts(self._tell, index)

    def on_start(self, num_starts: int, facts: wire.EngineFacts) -> None:
        """Implements `Observer.on_start`."""
        self._tell(self._rank)


class EnginePool(EngineClient):
    """Completes requests in several engines of one model, each of which is started again when it dies.

    When an engine dies, another computes its requests from the beginning. The tokens are the same, because the pool
    gives a seed to each request that has none, so a caller notices only a pause. A request that may be what ended the
    engine is given to no other: it waits until its own is there again. A request whose engine dies once more fails.
    """

    def __init__(
        self,
        config: EngineConfig,
        size: int,
        places: Places,
        limits: QueueLimits | None = None,
        chat_template: str | None = None,
    ):
        """Takes the `config` of each engine, and their number `size` at the start. Nothing starts before `launch`."""
        self.config = config
        self._places = places
        self._limits = (limits or QueueLimits()).share(size)
        self._readers = Readers(chat_template)
        self._observers: list[Observer] = []
        self._choice = MemberChoice(config.routing_policy)
        self._request_ids = count()
        self._seeds = random.Random(config.seed)
        self._is_closed = False
        self._closing: asyncio.Future[list[None]] | None = None
        self._is_scaling = False
        self._watching: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[Any]] = set()  # what engines are told that lasts
        self._in_turn = asyncio.Lock()  # so that all engines do what lasts in one order
        self._failure: asyncio.Future[None] | None = None
        self._members = self._new_members(range(size))

    # ---- its lifecycle ----

    def launch(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        for member in self._members:
            member.llm.launch()
            self._watch(member)

    async def ready(self) -> None:
        """Waits until one engine takes requests. Raises ValueError or RuntimeError when one cannot be built before."""
        await _first(member.llm.ready() for member in self._members)

    async def started(self) -> None:
        await _first(member.llm.started() for member in self._members)

    async def ended(self) -> None:
        assert self._failure is not None, "not launched"
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        self._is_closed = True
        if self._closing is None:
            for task in self._watching:
                task.cancel()
            self._closing = asyncio.gather(*(member.llm.close() for member in self._members))
        try:
            # Nothing cuts it short, or processes would be left that nobody waits for. Killing makes it quick.
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            for member in self._members:
                member.llm.kill()
            raise
        await self._places.close()

    # ---- its state ----

    @property
    def engines(self) -> Sequence[AsyncLLM]:
        """The engines by their number."""
        return [member.llm for member in self._members]

    @property
    def state(self) -> EngineState:
        """READY while one engine is, otherwise the state of the first."""
        if self._is_closed:
            return EngineState.CLOSED
        return self._foremost().state

    @property
    def reason(self) -> str:
        return self._foremost().reason

    @property
    def stats(self) -> EngineStats | None:
        """The sum over all engines as of their last pulses."""
        known = [member.llm.stats for member in self._members if member.llm.stats is not None]
        return EngineStats.summed(known) if known else None

    @property
    def is_responsive(self) -> bool:
        return any(member.llm.is_responsive for member in self._members)

    @property
    def is_known(self) -> bool:
        return any(member.llm.is_known for member in self._members)

    @property
    def facts(self) -> wire.EngineFacts:
        """The facts about the model. Numbers of replicas, pages and requests are sums over the engines known so far."""
        facts = [member.llm.facts for member in self._members if member.llm.is_known] or [self._foremost().facts]
        return msgspec.structs.replace(
            facts[0],
            num_replicas=sum(one.num_replicas for one in facts),
            num_pages=sum(one.num_pages for one in facts),
            max_num_seqs=sum(one.max_num_seqs for one in facts),
        )

    @property
    def reader(self) -> PromptReader:
        return self._known().reader

    @property
    def rules(self) -> RequestRules:
        return self._known().rules

    @property
    def max_requests(self) -> int | None:
        each = [member.llm.max_requests for member in self._members if member.llm.is_known]
        known = [most for most in each if most is not None]
        return sum(known) if known and len(known) == len(each) else None

    @property
    def num_requests(self) -> int:
        return sum(member.llm.num_requests for member in self._members)

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)
        for member in self._members:
            member.llm.observe_as(member.rank, observer)

    # ---- requests ----

    def new_request_id(self) -> str:
        return f"request-{next(self._request_ids)}"

    def enqueue(self, request: GenerationRequest) -> RequestStream:
        if any(member.llm.has(request.request_id) for member in self._members):
            raise ParameterError(f"request id {request.request_id!r} is in use: choose another", "request_id")
        if not (candidates := self._candidates()):
            raise EngineUnavailableError(self.reason)
        if request.params.seed is None:
            # Of an engine's own seeds no other engine knows, and several engines would draw the same ones.
            request = replace(request, params=replace(request.params, seed=self._seeds.getrandbits(63)))
        return self._choice.choose(candidates, request, self._known().facts).llm.enqueue(request)

    async def abort(self, request_id: str) -> None:
        for member in self._members:
            await member.llm.abort(request_id)

    async def ask[Reply](self, command: EngineCommand[Reply]) -> Reply:
        if command.forgets_prefixes:
            self._choice.forget_all()
        if not command.lasts:
            return command.joined(await _answers(command, [member.llm for member in self._ready()]))
        # It goes on when the caller leaves: engines that are being started again must hear of what the others do.
        asked = asyncio.create_task(self._ask_all(command))
        self._asking.add(asked)
        asked.add_done_callback(self._asking.discard)
        return await asyncio.shield(asked)

    async def _ask_all[Reply](self, command: EngineCommand[Reply]) -> Reply:
        """Asks the engines that are ready, and has all others do the same as soon as each is.

        Another command that lasts waits until this one is answered. Otherwise an engine could have done the later one
        already when it is found not to remember this one, and would do this one last.
        """
        async with self._in_turn:
            answers = await _answers(command, [member.llm for member in self._ready()])
            asked = cast(AnyCommand, command)
            uninformed = [member.llm for member in self._members if not member.llm.questions.remembers(asked)]
            for engine in uninformed:  # each that is not ready is told when it is
                engine.questions.remember(asked)
            late = [engine for engine in uninformed if engine.state is EngineState.READY]  # since the others were asked
            return command.joined([*answers, *await _answers(command, late)])

    # ---- its size ----

    @property
    def is_scaling(self) -> bool:
        """Whether engines are being added or removed."""
        return self._is_scaling

    async def scale(self, size: int, drain_seconds: float) -> None:
        """Changes the number of engines, and waits until that is done. No request fails.

        New engines take requests as soon as each is ready. If there are too many, the last ones finish their requests.
        What they have not finished after `drain_seconds` is computed by the others, from the beginning and with the
        same tokens.

        Raises ValueError for a number that is not possible, RuntimeError when a new engine cannot be built, after which
        none was added, and ScalingError while another call is at work.
        """
        if size < 1:
            raise ValueError(f"the number of engines must be at least 1, not {size}")
        if self._is_scaling:
            raise ScalingError("the number of engines is being changed already: wait until that is done")
        self._is_scaling = True
        try:
            if size > len(self._members):
                await self._grow(self._new_members(range(len(self._members), size)))
            else:
                leaving = self._members[size:]
                for member in leaving:
                    member.is_leaving = True
                await asyncio.gather(*(self._retire(member, drain_seconds) for member in leaving))
        finally:
            self._is_scaling = False

    async def _grow(self, new: list[Member]) -> None:
        for member in new:
            member.llm.questions.lasting |= self._members[0].llm.questions.lasting
            member.llm.launch()
        self._members += new
        try:
            await asyncio.gather(*(member.llm.ready() for member in new))
        except BaseException:
            for member in new:
                self._members.remove(member)
                self._hand_over(member)
            await asyncio.gather(*(member.llm.close() for member in new))
            raise
        for member in new:
            self._watch(member)

    async def _retire(self, member: Member, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await member.llm.idle()
        self._members.remove(member)
        self._hand_over(member)
        await member.llm.close()

    def _hand_over(self, member: Member) -> None:
        """Lets other engines compute the requests of one that leaves the pool."""
        for open_request in member.llm.hand_over():
            if not self._adopt(member.rank, open_request):
                open_request.stream.fail(EngineUnavailableError(self.reason))

    # ---- its engines ----

    def _new_members(self, ranks: Iterable[int]) -> list[Member]:
        """Makes an engine for each number. Raises ValueError, and has made none, when one of them has no place."""
        places = {rank: self._places.place(rank) for rank in ranks}
        return [Member(rank, self._new_llm(rank, place)) for rank, place in places.items()]

    def _new_llm(self, rank: int, place: Place) -> AsyncLLM:
        config = replace(self.config, data_parallel_rank=self.config.data_parallel_rank + rank)
        rescuer = partial(self._rescue, rank)
        llm = AsyncLLM.from_config(config, self._limits, place=place, readers=self._readers, rescuer=rescuer)
        for observer in (*self._observers, Starts(self._choice.forget)):
            llm.observe_as(rank, observer)
        return llm

    def _watch(self, member: Member) -> None:
        """Sees to it that an engine which could not be built is tried again, or that the pool ends if none could be."""

        async def watch() -> None:
            try:
                await member.llm.ended()
            except Exception as error:
                if member not in self._members:
                    return
                if not self.is_known:
                    self._fail(error)
                    return
                # Another engine shows that the options are right, so it is about this one's place, and may pass.
                logger.error("engine %d could not be built (%s): it is tried again", member.rank, error)
                await asyncio.sleep(LONGEST_PAUSE)
                await member.llm.close()
                lasting = member.llm.questions.lasting
                member.llm = self._new_llm(member.rank, self._places.place(member.rank))
                member.llm.questions.lasting |= lasting
                member.llm.launch()
                self._watch(member)

        task = asyncio.create_task(watch())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def _fail(self, error: Exception) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # marks it as seen: nobody may wait in `ended`

    def _foremost(self) -> AsyncLLM:
        """Returns an engine that is ready, or else the first one."""
        ready = (member.llm for member in self._members if member.llm.state is EngineState.READY)
        return next(ready, self._members[0].llm)

    def _known(self) -> AsyncLLM:
        """Returns an engine that has been ready, or else the first one."""
        known = (member.llm for member in self._members if member.llm.is_known)
        return next(known, self._members[0].llm)

    def _ready(self) -> list[Member]:
        """Returns the engines that are ready. Raises EngineUnavailableError when none is."""
        ready = [member for member in self._members if member.llm.state is EngineState.READY]
        if not ready:
            raise EngineUnavailableError(self.reason)
        return ready

    def _candidates(self, but: int | None = None) -> list[Member]:
        """Returns the engines that may get a request: as far as there are any, those that stay and that answer.

        Engine number `but` may not.
        """
        ready = [one for one in self._members if one.llm.state is EngineState.READY and one.rank != but]
        staying = [member for member in ready if not member.is_leaving] or ready
        return [member for member in staying if member.llm.is_responsive] or staying

    def _rescue(self, rank: int, open_request: OpenRequest, may_be_guilty: bool) -> Rescue:
        """Says what becomes of a request of engine `rank`, which has died, and gives it to another if it may have it.

        Whatever a request does to engines, it does to one of them alone.
        """
        if open_request.num_rewinds >= MOST_RESCUES or len(self._members) == 1:
            return Rescue.NONE
        if may_be_guilty or not self._adopt(rank, open_request):
            return Rescue.KEPT
        return Rescue.MOVED

    def _adopt(self, rank: int, open_request: OpenRequest) -> bool:
        if not (candidates := self._candidates(but=rank)):
            return False
        self._choice.choose(candidates, open_request.request, self._known().facts).llm.adopt(open_request)
        return True


async def _answers[Reply](command: EngineCommand[Reply], engines: Iterable[AsyncLLM]) -> list[Reply]:
    return await asyncio.gather(*(engine.ask(command) for engine in engines))


async def _first(works: Iterable[Awaitable[None]]) -> None:
    """Waits until one of `works` has ended, and raises its error."""
    waiting = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
