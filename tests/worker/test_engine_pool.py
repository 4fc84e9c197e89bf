"""What a user of `EnginePool` may rely on, whichever of its engines dies, comes or goes."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from jaxvllm.config import EngineConfig
from jaxvllm.core.lora import LoRARequest
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.routing import POLICIES, Asked, Candidate
from jaxvllm.core.sampling_params import RequestOutputKind as Kind
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.cores import num_cores
from jaxvllm.engine.commands import ResetPrefixCache
from jaxvllm.engine.stats import EngineStats
from jaxvllm.server.metrics.prometheus import Metrics
from jaxvllm.worker import data_parallel, engine_pool, sent_requests, wire
from jaxvllm.worker.async_llm import AsyncLLM
from jaxvllm.worker.data_parallel import MOST_ON_A_CORE, OneHost, OneProcess
from jaxvllm.worker.engine_client import EngineState
from jaxvllm.worker.engine_pool import EnginePool, ScalingError
from jaxvllm.worker.engine_process import EngineProcess
from jaxvllm.worker.observer import Observer
from jaxvllm.worker.open_requests import OpenRequest
from jaxvllm.worker.queue_limits import QueueLimits
from tests.faults.server import OPTIONS as SERVED
from tests.processes import stopped
from tests.waiting import PATIENCE, until

# The engine of tests/faults: one of them all compiles the programs.
OPTIONS: dict[str, Any] = SERVED | dict(row_buckets=(16,), token_buckets=(64,))
NUM_STREAMS = 50
PROMPTS = [f"Once upon a time there were {n} frogs who lived in a small pond near the old mill." for n in range(50)]


async def all_ready(pool: EnginePool) -> None:
    """Waits until every engine takes requests."""
    await asyncio.gather(*(engine.ready() for engine in pool.engines))


def params(number: int) -> SamplingParams:
    """Parameters of all kinds, so that what is known already is left out of each kind of output."""
    kind = (Kind.DELTA, Kind.DELTA, Kind.CUMULATIVE, Kind.FINAL_ONLY)[number // 2 % 4]
    some = SamplingParams(temperature=0.8, seed=number, max_tokens=60, ignore_eos=True, output_kind=kind)
    return replace(some, n=2, logprobs=1) if number % 5 == 1 else some


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def pool(portal: BlockingPortal) -> Iterator[EnginePool]:
    pool = EnginePool(EngineConfig.from_options(**OPTIONS), 2, OneHost(2, 1, "cpu"))
    portal.call(pool.start)
    portal.call(all_ready, pool)
    yield pool
    portal.call(pool.close)


@pytest.fixture(scope="module")
def expected(pool: EnginePool, portal: BlockingPortal) -> list[Any]:
    return portal.call(all_streams, pool)


async def stream(pool: EnginePool, number: int, tokens: list[list[int]]) -> Any:
    """All that a stream says, and its tokens as they come in `tokens`."""
    asked = params(number)
    texts, logprobs = [""] * asked.n, [0] * asked.n
    tokens += [[] for _ in range(asked.n)]
    ended = False
    async for output in pool.generate(PROMPTS[number], asked):
        assert not ended
        ended = output.finished
        for completion in output.outputs:
            i, more = completion.index, asked.output_kind is Kind.DELTA
            assert more or len(completion.token_ids) >= len(tokens[i]), "a stream went back"
            tokens[i][:] = [*tokens[i] * more, *completion.token_ids]
            texts[i] = texts[i] * more + completion.text
            logprobs[i] = logprobs[i] * more + len(completion.logprobs or ())
    assert ended
    return tokens, texts, logprobs


async def all_streams(pool: EnginePool, kill: AsyncLLM | None = None) -> list[Any]:
    """All streams at once. The process of `kill` is ended when some have had tokens for a while."""
    tokens: list[list[list[int]]] = [[] for _ in range(NUM_STREAMS)]
    asked = [asyncio.create_task(stream(pool, number, tokens[number])) for number in range(NUM_STREAMS)]
    if kill is not None:
        await until(lambda: sum(any(len(ids) > 20 for ids in of) for of in tokens) >= 5 and num_innocent(kill) > 8)
        assert kill.pid is not None
        os.kill(kill.pid, signal.SIGKILL)
    return await asyncio.gather(*asked)


def opened(engine: AsyncLLM) -> list[tuple[int, OpenRequest]]:
    """The requests of an engine that have not ended, with their serials."""
    requests = engine._requests.open
    return [(serial, one) for serial in requests.serials() if (one := requests.get(serial)) is not None]


def num_innocent(engine: AsyncLLM) -> int:
    return sum(not one.may_kill for _, one in opened(engine))


class Moves(Observer):
    """The requests that another engine took."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def on_loss(self, request_id: str, params: SamplingParams, reason: str) -> None:
        if reason == "moved":
            self.request_ids.append(request_id)


async def pages_owned(pool: EnginePool) -> int:
    return sum(1 for one in await pool.pages() for state in one.states if state == "owned")


def test_both_engines_work(pool: EnginePool, portal: BlockingPortal, expected: list[Any]) -> None:
    assert len({engine.pid for engine in pool.engines}) == 2
    portal.call(
        until, lambda: all(engine.stats is not None and engine.stats.num_output_tokens for engine in pool.engines)
    )
    assert pool.facts.num_replicas == 2 and pool.facts.max_num_seqs == 32
    assert pool.facts.num_pages == sum(engine.facts.num_pages for engine in pool.engines)
    assert len(portal.call(pool.pages)) == 2


@pytest.mark.slow
def test_the_streams_of_an_engine_that_is_killed_go_on_in_another(
    pool: EnginePool, portal: BlockingPortal, expected: list[Any]
) -> None:
    """Nobody notices: all tokens are the same, each comes once, and the engine comes back."""
    moves = Moves()
    pool.observe(moves)
    victim = pool.engines[1]
    assert portal.call(all_streams, pool, victim) == expected
    assert len(moves.request_ids) > 5
    portal.call(asyncio.wait_for, victim.ready(), PATIENCE)
    assert victim.num_starts == 2
    assert portal.call(pages_owned, pool) == 0
    assert portal.call(all_streams, pool) == expected


def test_the_streams_of_a_step_that_breaks_off_go_on_in_another_engine(
    pool: EnginePool, portal: BlockingPortal, expected: list[Any]
) -> None:
    async def run() -> None:
        await all_ready(pool)
        streams = asyncio.create_task(all_streams(pool))
        engine = pool.engines[0]
        await until(lambda: num_innocent(engine) > 8)
        process = engine._process
        assert process is not None
        receive, moves = process.receive, Moves()
        pool.observe(moves)

        async def broken() -> wire.Report:
            process.receive = receive  # type: ignore[method-assign]
            taken = engine._requests.open.serials(accepted=True)  # which it drops by itself
            process.send(wire.Abort([one.request.request_id for serial, one in opened(engine) if serial in taken]))
            return wire.Broken("ZeroDivisionError")

        process.receive = broken  # type: ignore[method-assign]
        assert await streams == expected
        assert len(moves.request_ids) > 5

    portal.call(run)


def test_a_request_whose_second_engine_dies_fails(pool: EnginePool, portal: BlockingPortal) -> None:
    """It may be what kills them."""

    async def run() -> None:
        await all_ready(pool)
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=Kind.DELTA, n=16)
        asked = await pool.submit(PROMPTS[0], long)
        await anext(asked)
        for _ in range(2):
            [engine] = [one for one in pool.engines if one.num_requests]
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda engine=engine: engine.state is not EngineState.READY)
        with pytest.raises(RuntimeError, match="was ended by signal 9.*send it again"):
            async for _ in asked:
                pass
        await all_ready(pool)

    portal.call(run)


def test_a_request_that_ends_its_engine_is_given_to_no_other(pool: EnginePool, portal: BlockingPortal) -> None:
    """The other engine gets what had tokens when its engine ended. What had none waits, and may end the same again."""

    async def run() -> None:
        await all_ready(pool)
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=Kind.FINAL_ONLY)
        formed = replace(long, structured_outputs=StructuredOutputsParams(regex="(a|b)+"))
        moves = Moves()
        pool.observe(moves)
        await until(lambda: all(engine.stats is not None for engine in pool.engines))
        with ExitStack() as stack:
            for engine in pool.engines:
                assert engine.pid is not None
                stack.enter_context(stopped(engine.pid))
            poison, *asked = [
                pool.enqueue(pool.make_request(PROMPTS[0], some))
                for some in (replace(long, n=16), *[long] * 4, *[formed] * 4)
            ]
            [victim] = [engine for engine in pool.engines if engine.has(poison.request_id)]
            [other] = [engine for engine in pool.engines if engine is not victim]
            here = [(serial, one) for serial, one in opened(victim) if one.stream is not poison]
            moving = {one.request.request_id for _, one in here if one.request.params.structured_outputs is None}
            staying = {one.request.request_id for _, one in here} - moving
            assert moving and staying and victim.pid is not None and victim.stats is not None
            # As the engine tells when it has computed a token of each.
            victim._read(wire.Pulse(victim.stats, [], [serial for serial, _ in here]))
            os.kill(victim.pid, signal.SIGKILL)
            starts = other.num_starts
            await until(lambda: victim.state is not EngineState.READY)
            assert set(moves.request_ids) == moving and all(other.has(name) for name in moving)
            assert all(victim.has(name) for name in (*staying, poison.request_id))
        await until(lambda: victim.state is EngineState.READY)
        with stopped(victim.pid):
            os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was ended by signal 9.*send it again"):
            async for _ in poison:
                pass
        for one in asked:
            if one.request_id in staying:
                await one.aclose()
            else:
                assert [output.finished async for output in one] == [True]
        assert other.num_starts == starts and set(moves.request_ids) == moving
        await all_ready(pool)

    portal.call(run)


def test_a_request_waits_for_its_engine_only_so_long(
    pool: EnginePool, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        await all_ready(pool)
        monkeypatch.setattr(sent_requests, "KEPT_SECONDS", 0.0)
        engine = pool.engines[0]
        assert engine.pid is not None
        with stopped(engine.pid):
            engine.enqueue(request := pool.make_request(PROMPTS[0], SamplingParams(seed=1)))
            [asked] = [one.stream for _, one in opened(engine) if one.request is request]
            os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was ended by signal 9.*send it again"):
            await asked.accepted()
        assert engine.num_requests == 0
        await all_ready(pool)

    portal.call(run)


@pytest.mark.slow
def test_engines_come_and_go_under_load(pool: EnginePool, portal: BlockingPortal, expected: list[Any]) -> None:
    async def run() -> None:
        async def scale(size: int, seconds: float) -> None:
            streams = asyncio.create_task(all_streams(pool))
            await until(lambda: pool.num_requests > NUM_STREAMS // 2)
            scaling = asyncio.create_task(pool.scale(size, seconds))
            await asyncio.sleep(0)
            assert pool.is_scaling
            with pytest.raises(ScalingError):
                await pool.scale(2, 1)
            await scaling
            assert len(pool.engines) == size and not pool.is_scaling
            assert await streams == expected

        await scale(3, 1)
        third = pool.engines[2]
        assert third.state is EngineState.READY
        await scale(2, PATIENCE)  # it finishes its requests
        assert third.state is EngineState.CLOSED
        await scale(1, 0.01)  # another computes them
        await scale(2, 1)

    portal.call(run)
    assert portal.call(pages_owned, pool) == 0


def test_an_engine_that_cannot_be_added(pool: EnginePool, portal: BlockingPortal, monkeypatch: Any) -> None:
    class NoRoom:
        def place(self, rank: int) -> Any:
            raise ValueError(f"engine {rank} needs a device")

    monkeypatch.setattr(pool, "_places", NoRoom())
    with pytest.raises(ValueError, match="engine 2 needs a device"):
        portal.call(pool.scale, 3, 1.0)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        portal.call(pool.scale, 0, 1.0)
    assert len(pool.engines) == 2 and not pool.is_scaling
    with pytest.raises(ValueError, match="their number is fixed"):
        OneProcess().place(1)


def test_metrics_are_of_the_engines_that_there_are(
    pool: EnginePool, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of those that were refused, nor of those that could not be built, nor of those that have left."""
    metrics = Metrics("jaxvllm", "demo")
    pool.observe(metrics)

    def engines() -> set[str]:
        return set(re.findall(r'^jaxvllm:num_requests_running{engine="(\d+)"', metrics.render()[0].decode(), re.M))

    class Occupied:
        async def start(self, config: EngineConfig, limits: QueueLimits) -> EngineProcess:
            assert engines() == {"0", "1", "2"}
            raise OSError("the device is in use")

    class Places:
        """One place that is in use, and no other."""

        def place(self, rank: int) -> Occupied:
            if rank > 2:
                raise ValueError(f"engine {rank} needs a device")
            return Occupied()

    assert engines() == {"0", "1"}
    monkeypatch.setattr(pool, "_places", Places())
    with pytest.raises(ValueError, match="engine 3 needs a device"):
        portal.call(pool.scale, 4, 1.0)
    assert engines() == {"0", "1"}
    with pytest.raises(OSError, match="in use"):
        portal.call(pool.scale, 3, 1.0)
    assert engines() == {"0", "1"}


def test_an_engine_that_cannot_be_built_beside_one_that_works_is_tried_again(
    pool: EnginePool, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about its place, and no reason to end the others."""

    class Occupied:
        async def start(self, config: EngineConfig, limits: QueueLimits) -> EngineProcess:
            raise OSError("the device is in use")

    async def run() -> None:
        monkeypatch.setattr(engine_pool, "LONGEST_PAUSE", 0.01)
        member = pool._members[1]
        await member.llm.close()
        member.llm = AsyncLLM.from_config(pool.config, place=Occupied())
        member.llm.launch()
        pool._watch(member)
        await until(lambda: member.llm.state is EngineState.READY)
        assert pool._failure is not None and not pool._failure.done()

    portal.call(run)


def test_a_seed_for_each_request_without_one(pool: EnginePool, portal: BlockingPortal) -> None:
    """Two engines with the same seed would answer equal requests alike."""

    async def run() -> list[str]:
        async def one() -> str:
            some = SamplingParams(temperature=1.0, max_tokens=30, output_kind=Kind.FINAL_ONLY)
            return [output.outputs[0].text async for output in pool.generate(PROMPTS[0], some)][-1]

        return await asyncio.gather(one(), one())

    assert len(set(portal.call(run))) == 2


def test_a_prompt_goes_where_it_was_sent_before(pool: EnginePool, portal: BlockingPortal, monkeypatch: Any) -> None:
    monkeypatch.setattr(pool._choice, "_is_by_prefix", True)
    monkeypatch.setattr(pool._choice, "_policy", POLICIES["prefix"])

    async def run() -> list[list[int]]:
        counts: list[list[int]] = []
        for number in (0, 1, 0, 0, 1, 1):
            before = [engine._requests.open.new_serial() for engine in pool.engines]
            some = SamplingParams(max_tokens=1)
            async for _ in pool.generate({"prompt_token_ids": [number + 5] * 128}, some):
                pass
            counts.append(
                [engine._requests.open.new_serial() - was for engine, was in zip(pool.engines, before, strict=True)]
            )
        return counts

    counts = portal.call(run)
    places = [count.index(max(count)) for count in counts]
    assert places[0] != places[1]
    assert places == [places[0], places[1], places[0], places[0], places[1], places[1]]
    # Pages of the model are none of an adapter, and those of one adapter none of another.
    found: list[list[int]] = []

    def look(candidates: Sequence[Candidate], asked: Asked) -> int:
        found.append([asked.num_cached(place) for place in range(len(candidates))])
        return 0

    monkeypatch.setattr(pool._choice, "_policy", look)
    prompt = Prompt(None, np.array([5] * 128, np.int32))
    for number in (None, 1, 2, 1):
        adapter = None if number is None else LoRARequest("adapter", number, "/adapter")
        request = GenerationRequest("one", prompt, SamplingParams(), lora_request=adapter)
        pool._choice.choose(pool._members, request, pool.facts)
    assert [max(of) > 0 for of in found] == [True, False, False, True]


def test_a_reset_of_the_prefix_cache_is_for_all_engines(
    pool: EnginePool, portal: BlockingPortal, monkeypatch: Any
) -> None:
    asked: list[tuple[Any, ...]] = []
    ask = AsyncLLM.ask

    async def noted(engine: AsyncLLM, command: Any) -> Any:
        asked.append((engine, command))
        return await ask(engine, command)

    monkeypatch.setattr(AsyncLLM, "ask", noted)
    assert portal.call(pool.reset_prefix_cache, False, True) is True
    assert asked == [(engine, ResetPrefixCache(False, True)) for engine in pool.engines]


def test_a_pause_is_for_all_engines(pool: EnginePool, portal: BlockingPortal) -> None:
    async def run() -> None:
        await pool.pause("keep")
        assert all([await engine.is_paused() for engine in pool.engines])
        assert all("SetPause" in engine.questions.lasting for engine in pool.engines)
        stream = await pool.submit(PROMPTS[0], SamplingParams(max_tokens=4))
        await pool.sleep(1, "keep")
        assert await pool.wake_up(["kv_cache"])
        assert not await pool.is_sleeping()
        assert [output async for output in stream][-1].finished

    portal.call(run)


def test_the_devices_of_each_engine() -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "3,4,5,7"}
    places = OneHost(2, 2, "gpu", gpus)
    assert [places.place(rank).environment for rank in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "3,4"},
        {"CUDA_VISIBLE_DEVICES": "5,7"},
    ]
    with pytest.raises(ValueError, match="engine 2 needs 2 GPUs, and this host has 4"):
        places.place(2)
    assert OneHost(2, 1, "cpu", {"NPROC": "3"}).place(0).environment == {"NPROC": "3"}
    assert int(OneHost(1, 8, "cpu", {}).place(0).environment["NPROC"]) >= 8
    most = MOST_ON_A_CORE * num_cores()
    for size in (1, most + 2):
        places = OneHost(size, 1, "cpu", {})
        places.place(max(size, most) - 1)
        with pytest.raises(ValueError, match="ask for fewer"):
            places.place(max(size, most))


def test_the_kind_of_device_is_known_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(files: str, package: str, **environment: str) -> str:
        monkeypatch.setattr(
            data_parallel, "_files", lambda patterns: [Path("/dev/0"), Path("/dev/1")] * (files in patterns)
        )
        monkeypatch.setattr(data_parallel, "find_spec", lambda name: name == package)
        return data_parallel.device_kind(environment)

    gpu, tpu = ("nvidia[0-9]*", "jax_cuda13_plugin"), ("accel*", "libtpu")
    assert (kind(*gpu), kind(*tpu), kind("", "libtpu"), kind("accel*", "")) == ("gpu", "tpu", "cpu", "cpu")
    assert kind(*gpu, JAX_PLATFORMS="cpu") == kind(*gpu, CUDA_VISIBLE_DEVICES="") == "cpu"
    assert kind("", "", JAX_PLATFORMS="cuda,cpu") == "gpu" and kind("", "", JAX_PLATFORMS="tpu") == "tpu"
    kind(*gpu)
    assert data_parallel.visible_gpus({}) == ["0", "1"]


def test_the_wire_is_the_same_for_all() -> None:
    """A rank goes to the engine in its config, which KV events tell."""
    config = replace(EngineConfig(), data_parallel_rank=3)
    start = wire.decode_command(wire.encode(wire.Start(config, EnginePool(config, 1, OneProcess())._limits)))
    assert isinstance(start, wire.Start) and start.config.data_parallel_rank == 3


def test_stats_of_several_engines_are_one() -> None:
    one = EngineStats(*range(20), num_accepted_per_pos=(3,), max_loras=2, running_adapters=("b", "a"))
    other = EngineStats(*range(20), num_accepted_per_pos=(1, 1), max_loras=2, running_adapters=("c", "b"))
    both = EngineStats.summed([one, other])
    assert (both.num_prompt_tokens, both.num_accepted_per_pos, both.max_loras) == (2, (4, 1), 2)
    assert (both.running_adapters, both.waiting_adapters) == (("a", "b", "c"), ())
