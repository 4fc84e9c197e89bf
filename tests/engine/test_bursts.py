"""Decode bursts: several decode steps in one program change no token, no text and no log-probability."""

from dataclasses import replace
from typing import Any

import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.burst_pace import BurstPace
from jaxvllm.engine.outputs import CompletionOutput
from tests.engine.tiny import GREEDY, few_pages, random_prompts

PROMPTS = random_prompts(12, longest=30, seed=5)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=23, ignore_eos=True)


def completions(llm: LLM, params: list[SamplingParams]) -> list[list[CompletionOutput]]:
    return [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0, "ignore_eos": False},
        {"logprobs": 3},
        {"stop": ["e", "ab"]},
        {"stop": ["a"], "include_stop_str_in_output": True, "logprobs": 0},
        {"stop_token_ids": (7, 70, 80, 90, 100, 120, 150, 180, 200), "logprobs": 1},
        {"stop_token_ids": tuple(range(20, 50)), "min_tokens": 6},
        {"n": 3},
        {"max_tokens": 1},
        {"max_tokens": 9},
    ],
    ids=str,
)
def test_everything_is_as_without_bursts(llm: LLM, bursting: LLM, options: dict[str, Any]) -> None:
    params = [replace(SAMPLED, seed=index, **options) for index in range(len(PROMPTS))]
    expected = completions(llm, params)
    bursting.engine.take_reports()
    got = completions(bursting, params)
    # Shapes differ, so do roundings of log-probabilities; texts, tokens and reasons may not.
    for one, other in zip(sum(got, []), sum(expected, []), strict=True):
        assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == (
            other.text,
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )
        assert [list(ranked) for ranked in one.logprobs or ()] == [list(ranked) for ranked in other.logprobs or ()]
        for ranked, others in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert [x.logprob for x in ranked.values()] == pytest.approx([x.logprob for x in others.values()], abs=1e-4)
    num_steps = max(report.num_steps for report in bursting.engine.take_reports())
    assert num_steps == (1 if options.get("max_tokens") == 1 else 8 if options.get("max_tokens") != 9 else num_steps)


def test_streams_add_up(llm: LLM, bursting: LLM) -> None:
    params = replace(SAMPLED, seed=3, logprobs=1)
    [whole] = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    deltas = list(bursting.stream(PROMPTS[0], replace(params, output_kind=RequestOutputKind.DELTA)))
    parts = [part for output in deltas for part in output.outputs]
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in part.token_ids] == whole.outputs[0].token_ids
    assert sum(len(part.logprobs or ()) for part in parts) == params.max_tokens
    assert len(deltas) < params.max_tokens, "several tokens are read at once"
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_tokens_survive_preemption_between_bursts(llm: LLM, bursting: LLM) -> None:
    params = [replace(GREEDY, max_tokens=40)] * len(PROMPTS)
    expected = completions(llm, params)
    before = bursting.engine.stats().num_preemptions
    with few_pages(bursting, 12):
        got = completions(bursting, params)
    assert [[c.token_ids for c in cs] for cs in got] == [[c.token_ids for c in cs] for cs in expected]
    assert bursting.engine.stats().num_preemptions > before


def test_each_step_of_a_burst_is_counted(bursting: LLM) -> None:
    before, _ = bursting.engine.stats().num_steps, bursting.engine.take_reports()
    bursting.generate([PROMPTS[0][:8]], replace(GREEDY, max_tokens=24), use_tqdm=False)
    reports = bursting.engine.take_reports()
    assert bursting.engine.stats().num_steps - before == sum(report.num_steps for report in reports) == 24
    assert len(reports) < 24


def test_a_burst_computes_on_for_rows_that_have_ended(bursting: LLM) -> None:
    before = bursting.engine.stats()
    bursting.engine.take_reports()
    params = [replace(GREEDY, max_tokens=4, min_tokens=4), replace(GREEDY, max_tokens=24, min_tokens=24)]
    bursting.generate([PROMPTS[0][:8], PROMPTS[1][:8]], params, use_tqdm=False)
    after = bursting.engine.stats()
    ended = after.num_ended_tokens - before.num_ended_tokens
    padding = after.num_padding_tokens - before.num_padding_tokens
    assert ended >= 1
    assert after.num_bucket_tokens - before.num_bucket_tokens == 16 + 3 + 23 + ended + padding


def test_a_request_that_waits_ends_the_bursts(bursting: LLM) -> None:
    engine = bursting.engine
    slots = engine.replicas[0].scheduler.slots.num_slots
    engine.take_reports()
    for index in range(slots + 1):  # the last one finds no slot, and none becomes free
        engine.submit(engine.check(str(index), [5, index + 2], replace(GREEDY, max_tokens=12)))
    while engine.stats().num_waiting:
        engine.step()
    assert {report.num_steps for report in engine.take_reports()} == {1}
    while engine.has_work:
        engine.step()


def test_abort_between_bursts_frees_everything(bursting: LLM) -> None:
    engine = bursting.engine
    for name in ("first", "second"):
        engine.submit(engine.check(name, PROMPTS[0], replace(GREEDY, max_tokens=60)))
    for _ in range(4):
        engine.step()
        engine.replicas[0].scheduler.check_invariants()
    output = engine.abort("first")
    assert output is not None and output.outputs[0].finish_reason == "abort"
    while engine.has_work:
        engine.step()
        engine.replicas[0].scheduler.check_invariants()


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_pace_keeps_to_the_time_that_an_arrival_may_wait(rows: int) -> None:
    pace = BurstPace(max_seconds=0.010)
    assert pace.width(rows, 8) == 1  # nothing is known of its steps
    pace.measured(rows, 1, 0.003)
    assert pace.width(rows, 8) == 3 and pace.width(rows, 2) == 2
    for _ in range(50):
        pace.measured(rows, 4, 0.004)
    assert pace.width(rows, 8) == 8 and 9 <= pace.width(rows, 64) <= 10
    for _ in range(50):
        pace.measured(rows, 1, 0.5)
    assert pace.width(rows, 8) == 1  # longer than that, a step is a step
    assert pace.width(16 * rows, 8) == 1  # of so many rows nothing is known


@pytest.mark.parametrize("call_seconds", [0.0, 0.0005, 0.002])
def test_what_a_call_costs_beside_its_steps_does_not_keep_bursts_short(call_seconds: float) -> None:
    """20 rows took 2.6 ms for one step and 3.2 for two. By the first alone there is no room for two in 4 ms."""
    pace, step_seconds, taken = BurstPace(max_seconds=0.004), 0.0006, list[float]()
    for _ in range(400):
        num_steps = pace.width(20, 64)
        taken.append(call_seconds + num_steps * step_seconds)
        pace.measured(20, num_steps, taken[-1])
    longest = int((0.004 - call_seconds) / step_seconds)
    chosen = [round((seconds - call_seconds) / step_seconds) for seconds in taken[200:]]
    assert sorted(chosen)[len(chosen) // 2] == longest and max(chosen) == longest + 1
    assert chosen.count(longest + 1) < 20, "a longer burst is tried now and then"


def test_bursts_are_long_again_behind_steps_that_the_machine_delayed() -> None:
    pace = BurstPace(max_seconds=0.004)
    for number in range(600):
        num_steps = pace.width(20, 64)
        is_slow = 100 <= number < 120
        pace.measured(20, num_steps, 0.05 if is_slow else 0.0005 + num_steps * 0.0001)
        if number == 120:
            assert num_steps == 1
    assert num_steps >= 30
