"""Speculation, grammars and reasoning together change no token, no text and no log-probability.

What they are compared with is one engine without drafts, without bursts and without guesses: every token of a
constrained request waits for its mask there. The tiny model has random weights, so it wants to leave every grammar.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.core import constrained_rows
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine.burst_pace import BurstPace
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.grammar.request_constraints import RequestConstraints
from jaxvllm.text.reasoning import ReasoningFormat
from tests.engine.test_speculation import Knowing, assert_equal, drafting
from tests.engine.tiny import (
    GREEDY,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    random_prompts,
    tiny_llm,
)
from tests.grammar.schema_cases import DIGIT, SHORT, array, closed

Answers = list[list[CompletionOutput]]

SCHEMA = closed(name=SHORT, kind={"enum": ["fox", "hello there", "hello you"]}, digits=array(DIGIT, 4))
TAG = {
    "structures": [{"begin": "<fn>", "schema": closed(ok={"type": "boolean"}), "end": "</fn>"}],
    "triggers": ["<fn>"],
}
FORMS: tuple[dict[str, Any], ...] = (
    dict(json=SCHEMA, disable_any_whitespace=True),
    dict(json=closed(ok={"type": "boolean"}, of=closed(n=DIGIT))),
    dict(regex="[ab]{3,9}(cd)+e the whole story of the (fox|time)"),
    dict(choice=("yes", "yes of course", "hello there was a time")),
    dict(grammar='root ::= "(" root ")" | "there was " [0-9]+'),
    dict(structural_tag=json.dumps(TAG)),
)
# Each changes which tokens are sampled, how many, or what is told of them.
WAYS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0),
    dict(temperature=1.0, n=2),
    dict(temperature=1.0, logprobs=2),
    dict(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4),
    dict(temperature=1.0, min_tokens=20),
    dict(temperature=0.0, stop=["e", ": "]),
    dict(temperature=1.0, repetition_detection=dict(max_pattern_size=3, min_count=3)),
    dict(temperature=1.0, top_p=0.8),
    dict(temperature=0.0, ignore_eos=True),
    dict(temperature=1.0, max_tokens=7),
    dict(temperature=0.5, max_tokens=12, bad_words=["b"]),  # which every form can do without
)
FREE = (dict(temperature=0.0), dict(temperature=1.0, logprobs=1), dict(temperature=1.0, stop=["e"]))
# The end mark is one token there, and several here.
OPEN = ReasoningFormat("<tool>", "東京都", is_open=True)
SPELLED = ReasoningFormat("<tool>", "fox.", is_open=True)


def asked(forms: Sequence[dict[str, Any]], **changes: Any) -> list[SamplingParams]:
    """Every form in each of the ways, and free requests between them."""
    params = []
    for number, (form, way) in enumerate(product(forms, WAYS)):
        structured = StructuredOutputsParams(**form)
        params.append(SamplingParams(seed=number, structured_outputs=structured, **{"max_tokens": 48} | way | changes))
        if number % 5 == 0:
            params.append(SamplingParams(seed=number, max_tokens=30, **FREE[number % len(FREE)]))
    return params


PARAMS = asked(FORMS)
PROMPTS = random_prompts(len(PARAMS), longest=20, seed=3)


def complete(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], aborted: Sequence[int] = ()
) -> Answers:
    """The answers of all requests at once, of which `aborted` end early. Looks at the scheduler after every step."""
    engine, answers = llm.engine, {}
    [replica] = engine.replicas
    holds_pages = engine.stats().num_pages_owned > 0  # the test itself, so that requests have few
    for index, (prompt, of) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(engine.check(str(index), prompt, of))
    left = list(aborted)
    steps = 0
    while engine.has_work:
        answers |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
        steps += 1
        if left and steps % 3 == 0:
            engine.abort(str(left.pop()))
        (replica.scheduler.slots if holds_pages else replica.scheduler).check_invariants()
    assert not left
    return [answers[index] for index in range(len(prompts)) if index not in aborted]


@contextmanager
def thinking(llm: LLM, marks: ReasoningFormat | None) -> Iterator[None]:
    """The engine of a model with these marks of its reasoning."""
    engine = llm.engine
    if marks is None:
        yield
        return
    assert engine.tokenizer is not None
    constraints = RequestConstraints(engine.tokenizer, engine.vocab_size, engine.eos_token_ids, marks, lenient=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.inputs, "constraints", constraints)
        patch.setattr(engine.inputs, "rules", replace(engine.inputs.rules, has_reasoning=True))
        yield
    constraints.close()


def thinkers(end: int) -> list[SamplingParams]:
    """Requests that think before they answer: some until they are cut off, others until they say `end` by chance."""
    return [
        replace(one, logit_bias={end: 4.0} if index % 2 else None, thinking_token_budget=(None, 0, 5, 11)[index % 4])
        if one.structured_outputs is not None or index % 3
        else one
        for index, one in enumerate(asked(FORMS[:3], max_tokens=60))
    ]


def assert_valid(params: Sequence[SamplingParams], answers: Answers, end: str | None = None) -> None:
    """Every answer in JSON that ended by itself is what its schema says, and there are some."""
    count = 0
    for one, completions in zip(params, answers, strict=True):
        form = one.structured_outputs
        for completion in completions:
            assert completion.finish_reason != "error"
            if form is not None and form.json is not None and not one.stop and completion.finish_reason == "stop":
                _, mark, answer = completion.text.partition(end) if end else ("", "-", completion.text)
                if mark:  # else it said EOS while it was thinking
                    jsonschema.validate(json.loads(answer), json.loads(form.json))
                    count += 1
    assert count > 5


@pytest.fixture(scope="module")
def plain(shared_llm: LLM) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_llm.engine.inputs, "_masks_commute", False)
        yield shared_llm


@pytest.fixture(scope="module")
def answers(plain: LLM) -> Answers:
    answers = complete(plain, PROMPTS, PARAMS)
    assert_valid(PARAMS, answers)
    return answers


@pytest.fixture(scope="module")
def thoughts(plain: LLM) -> dict[ReasoningFormat, tuple[list[SamplingParams], Answers]]:
    """Requests to a model that reasons, and their answers, for two spellings of its marks."""
    found = {}
    for marks in (OPEN, SPELLED):
        end = plain.get_tokenizer().encode(marks.end, add_special_tokens=False)[-1]
        params = thinkers(end)
        with thinking(plain, marks):
            found[marks] = params, complete(plain, PROMPTS[: len(params)], params)
        assert_valid(params, found[marks][1], marks.end)
    return found


@pytest.fixture(scope="module")
def hasty() -> Iterator[None]:
    """All steps have drafts, and are as many in one as may be: the clock of this machine decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        choose_drafts(patch)
        patch.setattr(BurstPace, "width", lambda self, num_rows, most: most)
        yield


@pytest.fixture(scope="module")
def told(tiny_checkpoint: Path, answers: Answers, hasty: None) -> Iterator[LLM]:
    """An engine that knows the answers. What it guesses is right, wrong, or no token at all, depending on the place."""
    sequences = [
        (*prompt, *completion.token_ids)
        for prompt, completions in zip(PROMPTS, answers, strict=True)
        for completion in completions
    ]
    proposer = Knowing(tuple(sequences), (0, 0, 0, 1, 0, 0, 10**6, 0, -(10**6)))
    with pytest.MonkeyPatch.context() as patch, drafting(tiny_checkpoint, patch, proposer) as llm:
        yield llm


@pytest.fixture(scope="module")
def itself(tiny_checkpoint: Path, hasty: None) -> Iterator[LLM]:
    """An engine whose model drafts for itself: it is always right about what the model says without a mask."""
    config = {"method": "draft_model", "model": str(tiny_checkpoint), "num_speculative_tokens": 7}
    with all_drafts_or_none(), tiny_llm(tiny_checkpoint, speculative_config=config, max_decode_burst=1) as llm:
        yield llm


@pytest.fixture(params=[pytest.param("told", marks=pytest.mark.slow), "itself"])
def drafted(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm: LLM = request.getfixturevalue(request.param)
    llm.reset_prefix_cache()
    yield llm
    assert_idle(llm)


def test_answers_are_those_without_drafts(drafted: LLM, answers: Answers) -> None:
    assert_equal(complete(drafted, PROMPTS, PARAMS), answers)
    # One after the other, so that rows guess with all of their drafts, and after cached prefixes.
    [replica] = drafted.engine.replicas
    before = replica.num_accepted.copy()
    some = range(0, len(PARAMS), 5)
    for index in some:
        assert_equal(complete(drafted, PROMPTS[index : index + 1], PARAMS[index : index + 1]), [answers[index]])
    assert (replica.num_accepted > before).all()


def test_answers_of_a_model_that_reasons_are_those_without_drafts(
    drafted: LLM, thoughts: dict[ReasoningFormat, tuple[list[SamplingParams], Answers]]
) -> None:
    for marks, (params, expected) in thoughts.items():
        with thinking(drafted, marks):
            assert_equal(complete(drafted, PROMPTS[: len(params)], params), expected)


def test_masks_preemptions_and_aborts_beside_drafts_change_nothing(
    drafted: LLM, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = range(0, 40, 3)
    left = [answer for index, answer in enumerate(answers) if index not in aborted]
    assert_equal(complete(drafted, PROMPTS, PARAMS, aborted), left)
    before = drafted.engine.stats().num_preemptions
    with few_pages(drafted, 14):
        assert_equal(complete(drafted, PROMPTS, PARAMS), answers)
    assert drafted.engine.stats().num_preemptions > before
    monkeypatch.setattr(drafted.engine.inputs, "_masks_commute", False)
    assert_equal(complete(drafted, PROMPTS, PARAMS), answers)


def guess_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows guess again at once when they were wrong."""
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE", "MOST_MASKS_FIRST"):
        monkeypatch.setattr(constrained_rows, name, 1)


def test_a_guess_that_spells_a_forced_text_otherwise_is_wrong(
    plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask allows the one token that is forced. So guesses must not depend on whether the host knew it in time."""
    tokenizer = plain.get_tokenizer()
    assert tokenizer.encode("the time", add_special_tokens=False) != [*map(tokenizer.encode, "the time")]
    likely = {tokenizer.encode(letter, add_special_tokens=False)[0]: 30.0 for letter in "h "}
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=number,
            logit_bias=likely,
            structured_outputs=StructuredOutputsParams(regex=regex),
            repetition_detection=detection,
        )
        for number in range(3, 17)
        for regex in (f"[h ]{{{number - 1}}} time!", "([h ]the time){4}")
        for detection in (None, dict(max_pattern_size=3, min_count=9))
    ]
    prompts = [[5, 6, 7]] * len(params)
    expected = complete(plain, prompts, params)
    guess_soon(monkeypatch)
    assert_equal(complete(drafted, prompts, params), expected)
    for one, prompt, answer in zip(params, prompts, expected, strict=True):
        assert_equal(complete(drafted, [prompt], [one]), [answer])


def test_a_draft_model_is_as_good_as_before_behind_wrong_guesses(itself: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    guess_soon(monkeypatch)
    [replica] = itself.engine.replicas
    replica.num_drafted[:] = replica.num_accepted[:] = 0
    regex = StructuredOutputsParams(regex="(.{1,12}[ab])*")
    params = [SamplingParams(temperature=t, seed=1, max_tokens=60, structured_outputs=regex) for t in (0.0, 1.0)]
    for one in params:
        complete(itself, [[5, 6, 7]], [one])
    assert (replica.num_accepted == replica.num_drafted).all() and replica.num_drafted[0] > 8


def test_steps_have_drafts_while_requests_wait(plain: LLM, drafted: LLM) -> None:
    """They wait for slots or pages until others have ended, and not longer than for one step of these."""
    prompts, params = PROMPTS[:20], [replace(GREEDY, max_tokens=20 + index) for index in range(20)]
    expected = complete(plain, prompts, params)
    engine, found = drafted.engine, {}
    engine.take_reports()
    for index, (prompt, of) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(engine.check(str(index), prompt, of))
    while engine.stats().num_waiting:
        found |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
        engine.replicas[0].scheduler.check_invariants()
    reports = engine.take_reports()
    assert {report.num_steps for report in reports} == {1}
    assert {report.num_drafts > 0 for report in reports if not report.num_prefill} == {True}
    while engine.has_work:
        found |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
    assert_equal([found[index] for index in range(20)], expected)
