"""What engines were told that lasts reaches each of them, whoever is started again and whoever leaves meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.engine.commands import AnyCommand, EngineCommand, SetPause, UpdateWeights
from jaxvllm.worker import wire
from jaxvllm.worker.async_llm import AsyncLLM
from jaxvllm.worker.data_parallel import OneHost
from jaxvllm.worker.engine_client import EngineState
from jaxvllm.worker.engine_pool import EnginePool

OLD, NEW = UpdateWeights("/old", "old"), UpdateWeights("/new", "new")


class Told:
    """A process that was told something, and has not answered yet."""

    def __init__(self, llm: AsyncLLM):
        self.asks: list[wire.Ask] = []
        self._num_answered = 0
        self._llm = llm
        llm._process = self  # type: ignore[assignment]
        llm._enter(EngineState.READY, "ready")
        llm._repeat(self)  # type: ignore[arg-type]

    def send(self, message: wire.Ask) -> None:
        self.asks.append(message)

    @property
    def commands(self) -> list[AnyCommand]:
        return [ask.command for ask in self.asks]

    async def answer(self) -> None:
        """Answers all that it was told, and lets those who wait hear it."""
        for told in self.asks[self._num_answered :]:
            value = told.command.version if isinstance(told.command, UpdateWeights) else True
            self._llm.questions.answer(wire.CommandAnswer.of(told.number, value))
        self._num_answered = len(self.asks)
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def begun[Reply](pool: EnginePool, command: EngineCommand[Reply]) -> "asyncio.Task[Reply]":
    task = asyncio.create_task(pool.ask(command))
    await settled()
    return task


def with_pool(test: Callable[[EnginePool], Awaitable[None]]) -> None:
    async def run() -> None:
        await test(EnginePool(EngineConfig.from_options(), 2, OneHost(2, 1, "cpu")))

    asyncio.run(run())


def test_an_engine_that_becomes_ready_while_weights_change_gets_the_new_ones() -> None:
    async def run(pool: EnginePool) -> None:
        first, second = pool.engines
        for engine in pool.engines:
            engine.questions.remember(OLD)
        one = Told(first)
        asked = await begun(pool, NEW)
        assert one.commands == [OLD, NEW]
        two = Told(second)
        assert two.commands == [OLD]
        await one.answer()
        assert two.commands == [OLD, NEW] and not asked.done()
        await two.answer()
        assert await asked == "new"
        assert Told(second).commands == [NEW]

    with_pool(run)


def test_an_engine_that_became_ready_with_the_new_weights_gets_them_once() -> None:
    """Engines whose weights got a name equally often have the same pages."""

    async def run(pool: EnginePool) -> None:
        first, second = pool.engines
        one = Told(first)
        asked = await begun(pool, NEW)
        second.questions.remember(NEW)  # as one that is added gets what another has done
        two = Told(second)
        await one.answer()
        assert await asked == "new" and two.commands == [NEW]

    with_pool(run)


@pytest.mark.parametrize("is_late", [False, True])
def test_all_engines_do_what_overlaps_in_one_order(is_late: bool) -> None:
    """With `is_late` the second engine becomes ready between the two commands."""
    pause, resume = SetPause("abort"), SetPause(None)

    async def run(pool: EnginePool) -> None:
        first, second = pool.engines
        engines = [Told(first)] if is_late else [Told(first), Told(second)]
        paused = await begun(pool, pause)
        if is_late:
            engines.append(Told(second))
        resumed = await begun(pool, resume)
        while not resumed.done():
            for one in reversed(engines):
                await one.answer()
        assert await paused and await resumed
        for engine, one in zip(pool.engines, engines, strict=True):
            assert one.commands == [pause, resume] and engine.questions.remembers(resume)

    with_pool(run)


@pytest.mark.parametrize("command", [NEW, SetPause("keep")])
def test_a_caller_who_leaves_makes_nobody_forget(command: AnyCommand) -> None:
    async def run(pool: EnginePool) -> None:
        first, second = pool.engines
        one = Told(first)
        asked = await begun(pool, command)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await one.answer()
        assert Told(first).commands == [command] and Told(second).commands == [command]

    with_pool(run)


def test_what_failed_is_not_done_again() -> None:
    async def run(pool: EnginePool) -> None:
        first, second = pool.engines
        one = Told(first)
        asked = await begun(pool, NEW)
        first.questions.answer(wire.CommandAnswer(one.asks[-1].number, reason="no such directory", kind="wrong"))
        with pytest.raises(ValueError, match="no such directory"):
            await asked
        assert Told(first).commands == Told(second).commands == []

    with_pool(run)
