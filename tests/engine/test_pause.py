"""Pauses of an engine, and its sleep: nothing is lost, nothing is compiled, and memory is given back."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import LLM, RequestOutput
from jaxvllm.engine.engine import Engine
from tests.conftest import Compilations
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, one_program, random_prompts, tiny_llm
from tests.jax_cache import same_programs_once

PROMPTS = random_prompts(10, longest=40, seed=7)  # eight run at once
type Count = Callable[[], AbstractContextManager[Compilations]]


@pytest.fixture
def awake(llm: LLM) -> Iterator[LLM]:
    """The engine of many tests, which this one leaves as it was."""
    yield llm
    llm.wake_up()
    assert not llm.is_sleeping()


def submit(engine: Engine) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.submit(engine.check(str(number), list(prompt), GREEDY))


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left to do, and returns the last outputs of requests, of which each has one."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in ended, "a request ended twice"
                ended[output.request_id] = output
    return ended


def some_steps(engine: Engine) -> None:
    """Steps until all slots are taken and tokens have come."""
    while engine.stats().num_running < 8:
        assert not any(output.finished for output in engine.step())
    for _ in range(3):
        assert not any(output.finished for output in engine.step())


def tokens_of(outputs: dict[str, RequestOutput]) -> list[list[int]]:
    return [outputs[str(number)].outputs[0].token_ids for number in range(len(PROMPTS))]


@pytest.mark.parametrize("releases", [False, True])
def test_kept_requests_go_on_as_if_nothing_had_been(awake: LLM, releases: bool, compilations: Count) -> None:
    expected, engine = greedy_tokens(awake, PROMPTS), awake.engine
    submit(engine)
    some_steps(engine)
    with compilations() as seen:
        engine.pause("keep")
        assert run(engine) == {}
        assert engine.is_settled and engine.stats().num_running == 8
        owned = engine.stats().num_pages_owned
        assert owned > 0
        if releases:
            awake.release_kv()
            assert (engine.sleeping, engine.stats().num_pages_owned) == (("kv_cache",), 0)
            assert engine.holders[0].memory_use().pages == 0
            with pytest.raises(ValueError, match="sleeps without its kv_cache: call wake_up"):
                awake.resume()
            assert awake.wake_up(["kv_cache"])
        else:
            awake.resume()
        assert tokens_of(run(engine)) == expected
    assert seen.count == 0, seen.names
    assert_idle(awake)


def test_an_abort_ends_all_that_run_and_wait_once(awake: LLM) -> None:
    expected, engine = greedy_tokens(awake, PROMPTS), awake.engine
    submit(engine)
    some_steps(engine)
    engine.pause("abort")
    assert not engine.is_settled  # the ends are yet to be told
    last = engine.abort("9")  # of one that the caller aborts, too, it is told now
    assert last is not None and engine.abort("9") is None
    ended = run(engine)
    assert "9" not in ended
    ended["9"] = last
    assert {output.outputs[0].finish_reason for output in ended.values()} == {"abort"}
    got = tokens_of(ended)
    assert all(mine == whole[: len(mine)] for mine, whole in zip(got, expected, strict=True))
    assert any(got) and not all(got)  # two have waited
    submit(engine)
    assert run(engine) == {} and engine.stats().num_waiting == len(PROMPTS)
    awake.resume()
    assert tokens_of(run(engine)) == expected


def test_a_request_that_was_never_queued_ends_like_the_others(awake: LLM) -> None:
    """Its grammar still compiles when a pause ends all."""
    engine = awake.engine
    one = engine.check("early", list(PROMPTS[0]), replace(GREEDY, n=2))
    engine.submit(one)
    with pytest.raises(ValueError, match="request id 'early' is in use"):
        engine.end(one)
    assert engine.abort("early") is not None
    engine.end(one)
    ended = run(engine)["early"]
    assert [(c.token_ids, c.finish_reason) for c in ended.outputs] == [([], "abort")] * 2
    assert_idle(awake)


def test_a_pause_waits_for_those_that_have_begun(awake: LLM) -> None:
    expected, engine = greedy_tokens(awake, PROMPTS), awake.engine
    submit(engine)
    some_steps(engine)
    engine.replicas[0].scheduler.preempt_all()  # they have begun all the same
    engine.pause("wait")
    ended = run(engine)
    assert ended.keys() == {str(number) for number in range(8)}
    assert engine.is_settled and engine.stats().num_waiting == 2
    awake.resume()
    assert tokens_of(ended | run(engine)) == expected


def test_a_stream_and_what_may_not_be_done_meanwhile(awake: LLM) -> None:
    [expected] = greedy_tokens(awake, PROMPTS[:1])
    stream = awake.stream(list(PROMPTS[0]), GREEDY)
    next(stream)
    awake.pause("wait")
    outputs = list(stream)  # what the pause has computed is told
    assert outputs[-1].outputs[0].token_ids == expected
    with pytest.raises(RuntimeError, match=r"paused, and computes nothing: call resume\(\)"):
        awake.generate([[5, 6]], GREEDY, use_tqdm=False)
    awake.resume()
    stream = awake.stream(list(PROMPTS[0]), GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="pause it first"):
        awake.release_kv()
    awake.pause("abort")
    assert awake.is_paused()
    [last] = stream
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    with pytest.raises(ValueError, match="level of sleep must be 0, 1 or 2, not 3"):
        awake.sleep(3)
    with pytest.raises(ValueError, match="tags must be among weights, kv_cache, scheduling, not 'kv'"):
        awake.wake_up(["kv"])  # type: ignore[list-item]


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_sleep_gives_memory_back(
    awake: LLM, is_on_host: bool, compilations: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a CPU stay where they are, and those of other devices move to the host's memory."""
    engine = awake.engine
    [holder] = engine.holders
    monkeypatch.setattr(holder, "_is_on_host", is_on_host)
    expected = greedy_tokens(awake, PROMPTS)
    submit(engine)
    some_steps(engine)
    with compilations() as seen:
        awake.sleep(1, mode="keep")
        assert engine.sleeping == (("kv_cache",) if is_on_host else ("weights", "kv_cache"))
        assert holder.memory_use().pages == 0
        assert (holder.memory_use().weights > 0) == is_on_host
        with pytest.raises(ValueError, match="so no request can end by itself: call wake_up"):
            awake.pause("wait")
        if not is_on_host:
            with pytest.raises(ValueError, match="the weights sleep"):
                _ = awake.weights
            assert not awake.wake_up(["weights"])
        assert not awake.wake_up(["weights"])
        assert awake.is_sleeping()
        assert run(engine) == {}
        assert awake.wake_up()
        assert tokens_of(run(engine)) == expected
    assert seen.count == 0, seen.names
    assert_idle(awake)


def test_dropped_weights_come_with_an_update_alone(awake: LLM, compilations: Count) -> None:
    expected, weights = greedy_tokens(awake, PROMPTS), awake.weights
    with compilations() as seen:
        awake.sleep(2)
        assert awake.engine.sleeping == ("weights", "kv_cache")
        assert not awake.wake_up()
        with pytest.raises(ValueError, match=r"without its weights: call wake_up, and after sleep\(level=2\) update"):
            awake.resume()
        awake.update_weights(weights)
        assert awake.wake_up()
        assert greedy_tokens(awake, PROMPTS) == expected
    assert seen.count == 0, seen.names


def test_a_step_that_breaks_off_leaves_the_pause(awake: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = awake.engine
    submit(engine)
    some_steps(engine)
    engine.pause("wait")
    with monkeypatch.context() as patch:
        patch.setattr(engine.replicas[0].runner, "collect", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(engine)
    submit(engine)
    assert engine.is_settled and engine.stats().num_waiting == len(PROMPTS)
    engine.pause("abort")
    assert {output.outputs[0].finish_reason for output in run(engine).values()} == {"abort"}
    awake.sleep(1)
    engine._reset()  # what has no pages gets none
    assert engine.sleeping == ("kv_cache",)


def test_meshes_and_replicas_sleep(llm: LLM, tiny_checkpoint: Path) -> None:
    expected = greedy_tokens(llm, PROMPTS)
    options: dict[str, Any] = {"mesh": "2x2", "compilation_cache": None}
    with same_programs_once(), one_program(), tiny_llm(tiny_checkpoint, **options) as other:
        for holder in other.engine.holders:
            holder._is_on_host = False
        submit(other.engine)
        for _ in range(6):
            other.engine.step()
        other.sleep(1, mode="keep")
        assert other.engine.sleeping == ("weights", "kv_cache")
        other.wake_up()
        assert tokens_of(run(other.engine)) == expected
        assert_idle(other)


def test_pages_that_go_elsewhere_stay(tiny_checkpoint: Path) -> None:
    config = json.dumps({"kv_connector": "host"})
    with tiny_llm(tiny_checkpoint, kv_transfer_config=config) as keeping:
        for refused in (keeping.sleep, keeping.release_kv):
            with pytest.raises(NotImplementedError, match="sleep at level 0"):
                refused()
            assert not keeping.is_paused()
        greedy_tokens(keeping, PROMPTS[:2])
        keeping.sleep(0, mode="keep")
        assert keeping.wake_up()
        greedy_tokens(keeping, PROMPTS[:2])
