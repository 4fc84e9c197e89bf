"""What a user of `AsyncLLM` may rely on, whatever happens to the engine's process."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from safetensors.numpy import load_file, save_file

from jaxvllm import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import OverloadedError
from jaxvllm.core.sampling_params import RequestOutputKind as Kind
from jaxvllm.engine.commands import UpdateWeights
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.worker import async_llm
from jaxvllm.worker.engine_client import EngineDiedError, EngineState, EngineUnavailableError
from jaxvllm.worker.observer import Observer
from jaxvllm.worker.queue_limits import QueueLimits
from jaxvllm.worker.wire import EngineFacts
from tests.processes import stop
from tests.quick import quick_engines
from tests.waiting import PATIENCE, until

OPTIONS: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1024, row_buckets=(4,), token_buckets=(64,), num_pages=150
)
DEMO = Path(__file__).parent.parent.parent / "jaxvllm/assets/demo"
PROMPTS = ["Once upon a time", "The capital of France is", "Tom and Lily", "In the forest there was", "The sun"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
# Twice as many as run at once: it does not end before a test has looked at it.
ENDLESS = replace(LONG, n=8)
# Two that run for long, and eight that may wait.
LIMITS = QueueLimits(num_requests=8, num_tokens=2000)


def test_a_chat_template_in_place_of_the_models() -> None:
    """The engine knows nothing of it: only prompts depend on it."""
    facts = EngineFacts(str(DEMO), 2048, 64, (1,), SamplingParams(), 1, 8, 16, 2)
    for template, prompt in ((None, "<|bos|><|user|>hi<|end|><|assistant|>"), ("{{ messages[0].content }}!", "hi!")):
        llm = AsyncLLM.from_config(EngineConfig(), chat_template=template)
        llm._open(facts)
        assert llm.tokenizer is not None
        assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == prompt


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def shared(portal: BlockingPortal) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_config(EngineConfig.from_options(**OPTIONS), LIMITS)
    portal.call(llm.start)
    yield llm
    portal.call(llm.close)


@pytest.fixture
def llm(shared: AsyncLLM, portal: BlockingPortal) -> Iterator[AsyncLLM]:
    portal.call(shared.ready)
    yield shared
    portal.call(until, lambda: shared.stats is not None and shared.num_requests == 0)


async def texts(llm: AsyncLLM, prompts: list[str], params: SamplingParams) -> list[str]:
    async def one(prompt: str) -> str:
        text = ""
        async for output in llm.generate(prompt, params):
            piece = output.outputs[0].text
            text = text + piece if params.output_kind is Kind.DELTA else piece
        return text

    return await asyncio.gather(*map(one, prompts))


async def pages_owned(llm: AsyncLLM) -> int:
    return sum(1 for pool in await llm.pages() for state in pool.states if state == "owned")


def test_the_same_tokens_as_offline(llm: AsyncLLM, portal: BlockingPortal) -> None:
    with quick_engines(), LLM(**OPTIONS) as offline:
        for params in (GREEDY, replace(GREEDY, temperature=1.0, seed=7)):
            expected = [output.outputs[0].text for output in offline.generate(PROMPTS, params, use_tqdm=False)]
            for kind in RequestOutputKind:
                assert portal.call(texts, llm, PROMPTS, replace(params, output_kind=kind)) == expected
        assert llm.facts.max_model_len == offline.engine.max_model_len


def test_fields_of_an_output(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> list[RequestOutput]:
        params = replace(GREEDY, n=2, logprobs=2, temperature=1.0, seed=1)
        return [output async for output in llm.generate(PROMPTS[0], params, "mine")]

    begin = time.monotonic()
    last = portal.call(run)[-1]
    elapsed = time.monotonic() - begin
    assert last.finished and last.request_id == "mine" and last.prompt == PROMPTS[0]
    assert llm.tokenizer is not None and last.prompt_token_ids == llm.tokenizer.encode(PROMPTS[0])
    assert [completion.index for completion in last.outputs] == [0, 1]
    for completion in last.outputs:
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    assert last.metrics is not None and last.metrics.first_token_seconds is not None
    assert 0 < last.metrics.first_token_seconds < elapsed


def test_a_slow_reader_misses_nothing(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> tuple[list[int], int]:
        params = replace(GREEDY, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        tokens, count = [], 0
        async with await llm.submit(PROMPTS[0], params, wants_draft_spans=True) as stream:
            async for output in stream:
                count += 1
                [delta] = output.outputs
                tokens += delta.token_ids
                assert delta.draft_spans is not None and "".join(text for text, _ in delta.draft_spans) == delta.text
                await until(lambda: llm.num_requests == 0)
        return tokens, count

    tokens, count = portal.call(run)
    assert len(tokens) == 60 and count == 2  # the first token, and all that came while it was read
    [whole] = portal.call(_ids, llm, replace(GREEDY, max_tokens=60, ignore_eos=True))
    assert tokens == whole


async def _ids(llm: AsyncLLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids async for output in llm.generate(PROMPTS[0], params) if output.finished]


@pytest.mark.parametrize("how", ["leave", "cancel", "abort"])
def test_who_leaves_frees_the_pages(llm: AsyncLLM, portal: BlockingPortal, how: str) -> None:
    async def run() -> None:
        stream = await llm.submit(PROMPTS[0], ENDLESS, "leaver")
        await anext(stream)
        assert await pages_owned(llm) > 0
        if how == "leave":
            await stream.aclose()
        elif how == "abort":
            await llm.abort("leaver")
            with pytest.raises(EngineDiedError, match="aborted"):
                async for _ in stream:
                    pass
        else:
            reading = asyncio.create_task(_read(stream))
            await asyncio.sleep(0.05)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        assert llm.num_requests == 0
        assert await pages_owned(llm) == 0
        with pytest.raises((StopAsyncIteration, EngineDiedError)):
            await anext(stream)

    async def _read(stream: Any) -> None:
        async with stream:
            async for _ in stream:
                pass

    portal.call(run)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([1, 99_999], {}, "outside the vocabulary"),
        ("x" * 5000, {}, "leaves no room"),
        ("x", {"priority": 1}, "needs an engine with scheduling_policy"),
    ],
)
def test_bad_requests(llm: AsyncLLM, portal: BlockingPortal, prompt: Any, options: Any, message: str) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match=message):
            await llm.submit(prompt, GREEDY, **options)

    portal.call(run)
    assert llm.num_requests == 0


def test_what_breaks_a_rule_is_not_sent(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        request = llm.make_request(PROMPTS[0], GREEDY, priority=1)
        with pytest.raises(ValueError, match="needs an engine with scheduling_policy"):
            llm.enqueue(request)  # which does not wait for the engine's answer

    portal.call(run)
    assert llm.num_requests == 0


def test_the_end_of_a_request_is_told_once(llm: AsyncLLM, portal: BlockingPortal) -> None:
    losses: list[tuple[str, str]] = []

    class Listener(Observer):
        def on_loss(self, request_id: str, params: SamplingParams, reason: str) -> None:
            losses.append((request_id, reason))

    async def run() -> None:
        aborted = await llm.submit(PROMPTS[0], ENDLESS, "aborted")
        await llm.abort("aborted")
        aborted.abort(TimeoutError())
        await aborted.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(aborted)
        left = await llm.submit(PROMPTS[0], ENDLESS, "left")
        await left.aclose()
        await llm.abort("left")
        await left.aclose()
        done = await llm.submit(PROMPTS[0], replace(GREEDY, output_kind=Kind.DELTA), "done")
        async for _ in done:
            pass
        done.abort(TimeoutError())
        await llm.abort("done")

    observers = list(llm._observers.listed)
    llm.observe(Listener())  # type: ignore[arg-type]
    try:
        portal.call(run)
    finally:
        llm._observers.listed[:] = observers
    assert losses == [("aborted", "abort"), ("left", "abort")]


def test_an_id_in_use(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        async with await llm.submit(PROMPTS[0], LONG, "twice"):
            with pytest.raises(ValueError, match="'twice' is in use"):
                await llm.submit(PROMPTS[0], GREEDY, "twice")

    portal.call(run)


def test_too_many_that_wait(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        streams = [await llm.submit(PROMPTS[0], LONG) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        streams += [await llm.submit(PROMPTS[0], LONG) for _ in range(8)]
        with pytest.raises(OverloadedError, match="8 requests wait already"):
            await llm.submit(PROMPTS[0], GREEDY)
        for stream in streams[4:]:
            await stream.aclose()
        long = [5] * 900
        streams += [await llm.submit(long, GREEDY) for _ in range(2)]
        with pytest.raises(OverloadedError, match="prompts of 2700 tokens would wait, and the most is 2000"):
            await llm.submit(long, GREEDY)
        for stream in streams:
            await stream.aclose()

    portal.call(run)


def test_too_many_for_an_engine_that_does_not_answer(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        assert llm.pid is not None
        stop(llm.pid)
        try:
            streams = [
                llm.enqueue(llm.make_request(PROMPTS[0], GREEDY)) for _ in range(12)
            ]  # 4 that run, and 8 that wait
            for stream in streams[:6]:  # who leaves makes no room: both messages wait
                await stream.aclose()
            with pytest.raises(OverloadedError, match="12 requests wait for the engine's answer"):
                llm.enqueue(llm.make_request(PROMPTS[0], GREEDY))
        finally:
            os.kill(llm.pid, signal.SIGCONT)
        for stream in streams[6:]:
            await stream.accepted()
            await stream.aclose()
        assert len(await texts(llm, PROMPTS, GREEDY)) == len(PROMPTS)

    portal.call(run)


def test_more_completions_than_could_ever_wait(llm: AsyncLLM, portal: BlockingPortal) -> None:
    with pytest.raises(ValueError, match="n is 13, and 12 requests are the most that may run and wait"):
        portal.call(llm.submit, PROMPTS[0], replace(GREEDY, n=13))


def test_who_reads_late_ends_no_other_request_of_that_id(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        first = await llm.submit(PROMPTS[0], replace(GREEDY, output_kind=Kind.FINAL_ONLY), "same")
        await until(lambda: llm.num_requests == 0)  # it has ended, and nobody has read it
        second = await llm.submit(PROMPTS[0], LONG, "same")
        await first.aclose()
        first.abort(TimeoutError())
        assert llm.num_requests == 1
        async with asyncio.timeout(PATIENCE):
            await anext(second)
        await second.aclose()

    portal.call(run)


def test_prompts_are_scored(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run(kind: RequestOutputKind) -> list[RequestOutput]:
        params = replace(GREEDY, prompt_logprobs=1, output_kind=kind)
        return [output async for output in llm.generate(PROMPTS[0], params)]

    [final] = portal.call(run, Kind.FINAL_ONLY)
    assert final.prompt_logprobs is not None and final.prompt_logprobs[0] is None
    assert [next(iter(told)) for told in final.prompt_logprobs if told] == final.prompt_token_ids[1:]
    deltas = portal.call(run, Kind.DELTA)
    assert [output.prompt_logprobs for output in deltas] == [final.prompt_logprobs] + [None] * (len(deltas) - 1)
    assert all(output.prompt_logprobs == final.prompt_logprobs for output in portal.call(run, Kind.CUMULATIVE))


def test_a_prefix_is_found_and_forgotten(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def cached(salt: str | None) -> int:
        prompt = {"prompt": "A long story about a fox. " * 12, "cache_salt": salt}
        [output] = [one async for one in llm.generate(prompt, replace(GREEDY, output_kind=Kind.FINAL_ONLY))]
        return output.num_cached_tokens

    async def run() -> list[int]:
        found = [await cached("a"), await cached("a"), await cached("b")]
        await llm.reset_prefix_cache()
        return [*found, await cached("a")]

    first, again, other, after = portal.call(run)
    assert first == other == after == 0 and again > 0


def test_each_who_resets_the_prefix_cache_hears_when_it_is_done(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        assert llm.pid is not None
        stop(llm.pid)
        try:
            resets = [asyncio.create_task(llm.reset_prefix_cache()) for _ in range(3)]
            done, _ = await asyncio.wait(resets, timeout=0.2)
            assert not done  # nobody has answered
            resets[0].cancel()  # and its answer is nobody else's
        finally:
            os.kill(llm.pid, signal.SIGCONT)
        results = await asyncio.gather(*resets, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, bool, bool]
        await llm.reset_prefix_cache()

    portal.call(run)


def test_the_socket_is_for_this_user_alone_and_soon_gone() -> None:
    async def run() -> None:
        llm = AsyncLLM(**OPTIONS)
        llm.launch()
        await until(lambda: llm._process is not None)
        assert llm._process is not None
        directory = Path(llm._process._socket.last_endpoint.decode().removeprefix("ipc://")).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "engine").stat().st_mode) == 0o600
        await llm.ready()
        assert not directory.exists()
        assert len(await texts(llm, PROMPTS[:1], GREEDY)) == 1
        await llm.close()

    asyncio.run(run())


def test_an_id_may_be_used_again_at_once(llm: AsyncLLM, portal: BlockingPortal) -> None:
    """What the engine said of the first request before it heard of the end of that is not the second one's."""

    async def run() -> None:
        [expected] = await texts(llm, PROMPTS[1:2], GREEDY)
        for _ in range(20):
            first = await llm.submit(PROMPTS[0], replace(LONG, n=3), "again")
            await anext(first)
            await first.aclose()
            text = ""
            delta = replace(GREEDY, output_kind=Kind.DELTA)
            async for output in llm.generate(PROMPTS[1], delta, "again"):
                assert output.prompt == PROMPTS[1] and len(output.outputs) == 1
                text += output.outputs[0].text
            assert text == expected

    portal.call(run)
    assert llm.num_requests == 0


def test_a_text_that_no_message_can_hold(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        with pytest.raises(UnicodeEncodeError):
            await llm.submit({"prompt": "x", "cache_salt": "\ud800"}, GREEDY)

    portal.call(run)
    assert llm.num_requests == 0


def test_an_observer_that_fails_fails_alone(llm: AsyncLLM, portal: BlockingPortal) -> None:
    class Broken:
        def of_engine(self, index: int) -> Any:
            return self

        def __getattr__(self, name: str) -> Callable[..., None]:
            def fail(*_: Any) -> None:
                raise ZeroDivisionError(name)

            return fail

    observers = list(llm._observers.listed)
    llm.observe(Broken())
    try:
        assert len(portal.call(texts, llm, PROMPTS, GREEDY)) == len(PROMPTS)
    finally:
        llm._observers.listed[:] = observers


def test_a_reader_whose_stream_is_closed(llm: AsyncLLM, portal: BlockingPortal) -> None:
    async def run() -> None:
        stream = await llm.submit(PROMPTS[0], replace(LONG, output_kind=Kind.FINAL_ONLY))
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(reading, PATIENCE)

    portal.call(run)


def test_a_killed_engine_comes_back_paused_and_with_its_new_weights(
    llm: AsyncLLM, portal: BlockingPortal, tmp_path: Path
) -> None:
    tensors = load_file(DEMO / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]  # the least likely tokens are the most likely
    save_file(tensors, tmp_path / "model.safetensors")

    async def run() -> None:
        [original] = await texts(llm, PROMPTS[:1], GREEDY)
        with pytest.raises(ValueError, match="nowhere"):
            await llm.ask(UpdateWeights(str(tmp_path / "nowhere")))
        assert await texts(llm, PROMPTS[:1], GREEDY) == [original]
        assert await llm.ask(UpdateWeights(str(tmp_path)))
        [before] = await texts(llm, PROMPTS[:1], GREEDY)
        assert before != original
        streams = [await llm.submit(PROMPTS[0], LONG) for _ in range(6)]
        await anext(streams[0])
        await llm.pause("keep")
        old = llm.pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDiedError, match="was ended by signal 9"):
                while True:
                    await anext(stream)
        with pytest.raises(EngineUnavailableError, match="started again"):
            await llm.submit(PROMPTS[0], GREEDY)
        assert llm.state is EngineState.RESTARTING and not llm.is_responsive
        await llm.ready()
        assert await llm.is_paused()
        await llm.resume()
        assert await texts(llm, PROMPTS[:1], GREEDY) == [before]
        assert await pages_owned(llm) == 0 and llm.pid != old
        assert await llm.ask(UpdateWeights(str(DEMO)))
        assert await texts(llm, PROMPTS[:1], GREEDY) == [original]

    portal.call(run)


def test_a_stopped_engine_is_not_responsive(
    llm: AsyncLLM, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "RESPONSIVE_SECONDS", 1.5)

    async def run() -> None:
        assert llm.pid is not None
        stop(llm.pid)
        await until(lambda: not llm.is_responsive)
        os.kill(llm.pid, signal.SIGCONT)
        await until(lambda: llm.is_responsive)
        assert len(await texts(llm, PROMPTS, GREEDY)) == len(PROMPTS)

    portal.call(run)


def test_a_server_that_was_held_up_does_not_blame_its_engine(
    llm: AsyncLLM, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answered, and nobody had the time to read that."""
    monkeypatch.setattr(async_llm, "RESPONSIVE_SECONDS", 1.0)

    async def run() -> None:
        await until(lambda: llm.is_responsive)
        time.sleep(1.5)
        assert llm.is_responsive

    portal.call(run)


def test_a_stuck_engine_is_replaced(llm: AsyncLLM, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        old = llm.pid
        assert old is not None
        stop(old)
        reset = asyncio.create_task(llm.reset_prefix_cache())
        with monkeypatch.context() as patch:
            patch.setattr(async_llm, "STUCK_SECONDS", 1.5)
            await until(lambda: llm.state is EngineState.RESTARTING)
        with pytest.raises(EngineDiedError):
            await reset
        await llm.ready()
        assert llm.pid != old
        assert len(await texts(llm, PROMPTS, GREEDY)) == len(PROMPTS)

    portal.call(run)


def test_an_engine_that_is_stuck_while_it_is_built_again(
    llm: AsyncLLM, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        first = llm.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: llm.pid not in (first, None))
        second = llm.pid
        assert second is not None and llm.state is EngineState.RESTARTING
        stop(second)
        with monkeypatch.context() as patch:
            patch.setattr(async_llm, "STUCK_SECONDS", 1.5)
            patch.setattr(async_llm, "BUILD_FACTOR", 0)
            await until(lambda: llm.pid not in (second, None))
        await llm.ready()
        assert len(await texts(llm, PROMPTS, GREEDY)) == len(PROMPTS)

    portal.call(run)
