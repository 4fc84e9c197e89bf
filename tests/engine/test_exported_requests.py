"""A request that moves to another engine in the middle gets the tokens, texts and log-probabilities of one engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.sampling_params import RepetitionDetectionParams, RequestOutputKind
from jaxvllm.engine.exported_request import ExportedRequest
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from tests.engine.test_speculation import OPTIONS, PROMPTS, SAMPLED
from tests.engine.tiny import GREEDY, assert_idle, one_program, tiny_llm

WAYS: list[dict[str, Any]] = [
    *OPTIONS,
    # Some of these completions have ended when the others move.
    {"temperature": 1.0, "n": 4, "stop_token_ids": tuple(range(40, 68)), "logprobs": 1},
    {"temperature": 1.0, "n": 4, "stop_token_ids": tuple(range(40, 68)), "include_stop_str_in_output": True},
    {"temperature": 1.0, "seed": -7},
    {"temperature": 0.0, "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=3)},
]
REQUESTS = [
    (PROMPTS[number % len(PROMPTS)], replace(SAMPLED, **{"seed": number, **way}), kind)
    for number, way in enumerate(WAYS)
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=9)


@pytest.fixture(scope="module", params=["1x1", "1x2"])
def second(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[LLM]:
    """An engine with another mesh, other chunks and another pool."""
    other = dict(max_num_batched_tokens=24, token_buckets=(24,), num_pages=97)
    with one_program(24), tiny_llm(tiny_checkpoint, mesh=request.param, warm_up="background", **other) as llm:
        yield llm
        assert_idle(llm)


def submit(llm: LLM, name: str, prompt: Sequence[int], params: SamplingParams, **options: Any) -> None:
    llm.engine.submit(llm.engine.check(name, list(prompt), params, **options))


class Reader:
    """What callers have been told of each completion, in whichever form, from one engine and then another."""

    def __init__(self) -> None:
        self.whole: dict[tuple[str, int], CompletionOutput] = {}
        self.scores: dict[str, object] = {}

    def read(self, outputs: Sequence[RequestOutput], is_delta: bool = True) -> None:
        for output in outputs:
            if output.prompt_logprobs is not None:
                self.scores[output.request_id] = output.prompt_logprobs
            for one in output.outputs:
                self._add((output.request_id, one.index), one, is_delta and output.request_id.startswith("delta"))

    def _add(self, name: tuple[str, int], new: CompletionOutput, is_delta: bool) -> None:
        before = self.whole.get(name)
        if before is not None and is_delta:
            assert before.finish_reason is None, "a completion is told again after its end"
            text, token_ids = before.text + new.text, before.token_ids + new.token_ids
            logprobs = None if new.logprobs is None else [*(before.logprobs or ()), *new.logprobs]
            new = replace(new, text=text, token_ids=token_ids, logprobs=logprobs)
        self.whole[name] = new


def submit_all(llm: LLM) -> None:
    for number, (prompt, params, kind) in enumerate(REQUESTS):
        submit(llm, f"{kind.name.lower()} {number}", prompt, replace(params, output_kind=kind))


def step(llm: LLM, reader: Reader) -> None:
    reader.read(llm.engine.step())
    for replica in llm.engine.replicas:
        replica.scheduler.check_invariants()


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> Reader:
    reader = Reader()
    with tiny_llm(tiny_checkpoint) as llm:
        submit_all(llm)
        while llm.engine.has_work:
            step(llm, reader)
    return reader


def assert_same(got: Reader, expected: Reader) -> None:
    assert got.whole.keys() == expected.whole.keys()
    for name, one in expected.whole.items():
        other = got.whole[name]
        assert (other.token_ids, other.text) == (one.token_ids, one.text), name
        assert (other.finish_reason, other.stop_reason) == (one.finish_reason, one.stop_reason), name
        assert (other.logprobs is None) == (one.logprobs is None), name
        for given, right in zip(other.logprobs or (), one.logprobs or (), strict=True):
            assert list(given) == list(right), name
            values = ([value.logprob for value in ranked.values()] for ranked in (given, right))
            np.testing.assert_allclose(*values, atol=1e-5, err_msg=str(name))
    assert got.scores.keys() == expected.scores.keys()


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_requests_that_move_to_and_fro_are_as_if_they_had_stayed(
    llm: LLM, second: LLM, expected: Reader, seed: int
) -> None:
    """At every step some of the requests that are left move to the other engine, waiting ones too."""
    random, reader, engines = np.random.default_rng(seed), Reader(), (llm.engine, second.engine)
    submit_all(llm)
    num_moves = 0
    while llm.engine.has_work or second.engine.has_work:
        for one in (llm, second):
            if one.engine.has_work:
                step(one, reader)
        for here, there in (engines, engines[::-1]):
            for name in list(here.outputs._live):
                if random.random() < 0.06:
                    exported = ExportedRequest.from_bytes(here.export_request(name).to_bytes())
                    assert there.import_request(exported) == name
                    num_moves += 1
        for one in (llm, second):
            one.engine.replicas[0].scheduler.check_invariants()
    assert num_moves > len(REQUESTS)
    assert_same(reader, expected)
    for one in (llm, second):
        assert_idle(one)


def test_its_pages_come_along(llm: LLM, second: LLM) -> None:
    prompt = list(range(40, 90))
    second.engine.reset_prefix_cache()
    submit(llm, "a", prompt, GREEDY)
    for _ in range(12):
        llm.engine.step()
    exported = llm.engine.export_request("a")
    finish(llm)
    assert_idle(llm)
    tokens = [*prompt, *exported.sequences[0].output_token_ids]
    page_size = llm.config.page_size
    assert len(exported.sequences[0].output_token_ids) > 3
    assert len(exported.pages) == (len(tokens) - 1) // page_size
    second.engine.import_request(exported)
    [queued] = second.engine.replicas[0].scheduler.queue
    cached = second.engine.replicas[0].scheduler.num_cached_tokens(queued)
    assert cached == (len(tokens) - 1) // page_size * page_size
    [output] = finish(second)
    expected = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert output.outputs[0].token_ids == expected


def test_the_seed_that_an_engine_drew_goes_along(llm: LLM, second: LLM) -> None:
    params = replace(SAMPLED, temperature=1.0, seed=None)
    submit(llm, "s", PROMPTS[4], params)
    for _ in range(4):
        llm.engine.step()
    exported = llm.engine.export_request("s")
    finish(llm)
    second.engine.import_request(exported)
    [output] = finish(second)
    seeded = replace(params, seed=exported.sequences[0].seed)
    assert output.outputs[0].token_ids == llm.generate([PROMPTS[4]], seeded, use_tqdm=False)[0].outputs[0].token_ids


def test_a_beam_search_begins_again_elsewhere(llm: LLM, second: LLM) -> None:
    sampling = BEAMS.sampling_params(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    submit(llm, "b", PROMPTS[3], sampling, beam_search=BEAMS)
    [expected] = finish(llm)
    submit(llm, "b", PROMPTS[3], sampling, beam_search=BEAMS)
    for _ in range(5):
        llm.engine.step()
    second.engine.import_request(llm.engine.export_request("b"))
    assert not finish(llm)
    [moved] = finish(second)
    assert [one.token_ids for one in moved.outputs] == [one.token_ids for one in expected.outputs]


def test_a_request_that_waits_for_a_slot_moves(llm: LLM, second: LLM) -> None:
    submit(llm, "w", PROMPTS[2], GREEDY)
    exported = llm.engine.export_request("w")
    assert not exported.pages and not llm.engine.has_work
    second.engine.import_request(exported)
    [output] = finish(second)
    assert output.outputs[0].token_ids == llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_what_cannot_go_on_is_refused_and_changes_nothing(llm: LLM, second: LLM) -> None:
    with pytest.raises(ValueError, match="request 'nobody' is unknown or has ended"):
        llm.engine.export_request("nobody")
    submit(llm, "r", PROMPTS[1], GREEDY)
    for _ in range(6):
        llm.engine.step()
    exported = llm.engine.export_request("r")
    finish(llm)
    state = exported.sequences[0]
    digest, page = next(iter(exported.pages.items()))
    for wrong, why in (
        (replace(exported, model=b"another"), "another model"),
        (replace(exported, sequences={}), "is not one that an engine has exported"),
        (replace(exported, sequences={0: replace(state, output_token_ids=[1 << 20])}), "is not one that an engine"),
        (replace(exported, sequences={0: replace(state, output_token_ids=[5] * 99)}), "is not one that an engine"),
        (replace(exported, sequences={0: replace(state, num_unreported=-1)}), "is not one that an engine"),
        (replace(exported, pages={digest: page[:-1]}), "cut off"),
        (replace(exported, pages={digest: page[:-1] + bytes([page[-1] ^ 1])}), "check sum"),
    ):
        with pytest.raises(ValueError, match=why):
            second.engine.import_request(wrong)
        assert_idle(second)
    with pytest.raises(ValueError):
        ExportedRequest.from_bytes(exported.to_bytes()[:-1])
    second.engine.import_request(exported)
    with pytest.raises(ValueError, match="is in use"):
        second.engine.import_request(exported)
    finish(second)


def finish(llm: LLM) -> list[RequestOutput]:
    """Steps until nothing is left, and returns the last outputs."""
    outputs = []
    while llm.engine.has_work:
        outputs += llm.engine.step()
    return [output for output in outputs if output.finished]
