"""Structured outputs in the engine: answers have their form, alone, batched, chunked, preempted and on a mesh."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from jaxvllm import LLM, RequestOutput, SamplingParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.constraint import GrammarConstraint
from jaxvllm.text.reasoning import ReasoningFormat
from tests.engine.tiny import assert_idle, few_pages, one_program
from tests.grammar.schema_cases import CASES, DIGIT, SHORT, Schema, array, closed
from tests.quick import quick_engines

# Room for all rows of `MIXED`: most tests have fewer requests, and every step computes all rows.
OPTIONS: dict[str, Any] = dict(
    max_num_seqs=24,
    max_num_batched_tokens=96,
    row_buckets=(24,),
    token_buckets=(96,),
    max_model_len=512,
    num_pages=1200,
)
FORMATS = {
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?(z|Z|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\d[tT ]\d\d:\d\d:\d\d(\.\d+)?(z|Z|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
    "email": r"[^@]+@[^@]+",
}
CHECKER = jsonschema.FormatChecker(())
for name, pattern in FORMATS.items():
    CHECKER.checks(name)(
        lambda value, wanted=re.compile(pattern): type(value) is not str or bool(wanted.fullmatch(value))
    )

# Every form, and how many of the tokens are forced differs between them.
FORMS = (
    StructuredOutputsParams(json=closed(name=SHORT, ok={"type": "boolean"}), disable_any_whitespace=True),
    StructuredOutputsParams(json=closed(kind={"const": "a long text that is forced"}, digits=array(DIGIT, 9))),
    StructuredOutputsParams(regex="[a-z]{3,9} (und|oder) [a-z]{3,9}"),
    StructuredOutputsParams(choice=("yes", "no", "I would not know what to say about this")),
    StructuredOutputsParams(grammar='root ::= "(" root ")" | [0-9]+'),
    None,
)
PROMPTS = [f"{'Once upon a time there was a fox. ' * (i % 4)}Number {i}:" for i in range(18)]
MIXED = [
    SamplingParams(
        temperature=0 if i % 5 == 0 else 1.0,
        seed=100 + i,  # none of these draws is a near tie, which a mesh may round to the other token
        max_tokens=30,
        n=1 + (i % 6 == 1),
        top_k=40 if i % 4 == 1 else 0,
        logprobs=2 if i % 7 == 3 else None,
        repetition_penalty=1.3 if i % 8 == 5 else 1.0,
        stop=[" u"] if i % 6 == 2 and i % 4 else [],
        min_tokens=6 if i % 9 == 3 else 0,
        structured_outputs=FORMS[i % 6],
    )
    for i in range(18)
]


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_engines(run_long=True):
        yield


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(demo: LLM) -> Iterator[LLM]:
    demo.reset_prefix_cache()
    yield demo
    assert_idle(demo)


def generate(llm: LLM, prompts: list[str], params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(demo: LLM) -> list[list[list[int]]]:
    """The tokens of each of `MIXED` without any other request."""
    return [tokens(generate(demo, [prompt], params))[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)]


def is_valid(schema: Schema, text: str) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    return validator.is_valid(json.loads(text))


def test_every_answer_that_finished_validates(llm: LLM) -> None:
    asked = [
        SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=120,
            structured_outputs=StructuredOutputsParams(json=case, disable_any_whitespace=index % 2 == 0),
        )
        for index, case in enumerate(CASES)
    ]
    outputs = [output.outputs[0] for output in generate(llm, ["As JSON: "] * len(CASES), asked)]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    finished = [
        (case, output.text) for case, output in zip(CASES, outputs, strict=True) if output.finish_reason == "stop"
    ]
    assert len(finished) > 180
    assert [one for one in finished if not is_valid(*one)] == []


def test_a_batch_changes_no_token(llm: LLM, alone: list[list[list[int]]]) -> None:
    assert tokens(generate(llm, PROMPTS, MIXED)) == alone
    free = [index for index, params in enumerate(MIXED) if params.structured_outputs is None]
    assert tokens(generate(llm, [PROMPTS[i] for i in free], [MIXED[i] for i in free])) == [alone[i] for i in free]


def test_preemption_changes_no_token(llm: LLM, alone: list[list[list[int]]]) -> None:
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, 24):
        assert tokens(generate(llm, PROMPTS, MIXED)) == alone
    assert llm.engine.stats().num_preemptions > before


def test_chunking_bursts_and_a_mesh_change_no_token(alone: list[list[list[int]]]) -> None:
    small = dict(max_num_seqs=7, max_num_batched_tokens=24, row_buckets=(7,), token_buckets=(24,))
    with one_program(24, 7), LLM(**OPTIONS | small | dict(mesh="1x2")) as other:
        assert tokens(generate(other, PROMPTS, MIXED)) == alone


def test_a_stream_has_each_token_once_and_in_order(llm: LLM, alone: list[list[list[int]]]) -> None:
    engine = llm.engine
    for index in (0, 1, 2, 3, 4):
        [output] = [*llm.stream(PROMPTS[index], MIXED[index])][-1:]
        assert [completion.token_ids for completion in output.outputs] == alone[index]
        whole = [*llm.stream(PROMPTS[index], replace(MIXED[index], n=1))]
        lengths = [len(one.outputs[0].token_ids) for one in whole]
        assert lengths == sorted(set(lengths)), "no output without something new"
        assert all(
            one.outputs[0].token_ids == alone[index][0][:length] for one, length in zip(whole, lengths, strict=True)
        )
    assert not engine.has_work


def test_forced_tokens_take_no_steps_of_their_own(llm: LLM) -> None:
    text = "every one of these words is known before the model says anything at all"
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"[ab]{text}[ab]"), max_tokens=60)
    before = llm.engine.stats()
    [output] = generate(llm, ["Say: "], asked)
    steps = llm.engine.stats().num_steps - before.num_steps
    assert output.outputs[0].text[1:-1] == text and output.outputs[0].finish_reason == "stop"
    count = len(output.outputs[0].token_ids)
    assert llm.engine.stats().num_output_tokens - before.num_output_tokens == count
    assert 2 * steps < count
    # What the caller wants to know of every token is computed for every token.
    [ranked] = generate(llm, ["Say: "], replace(asked, logprobs=0, seed=1))
    assert len(ranked.outputs[0].logprobs or ()) == len(ranked.outputs[0].token_ids)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_a_limit_among_forced_tokens_holds(llm: LLM, most: int) -> None:
    choice = StructuredOutputsParams(choice=("one two three four five six seven eight",))
    [output] = generate(llm, ["Count: "], SamplingParams(max_tokens=most, structured_outputs=choice))
    [whole] = generate(llm, ["Count: "], SamplingParams(max_tokens=100, structured_outputs=choice))
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:most]
    assert (output.outputs[0].finish_reason, whole.outputs[0].finish_reason) == ("length", "stop")


def test_stops_among_forced_tokens_hold(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=("one two three four five six",))
    asked = SamplingParams(max_tokens=100, structured_outputs=choice)
    [whole] = generate(llm, ["Count: "], asked)
    [by_text] = generate(llm, ["Count: "], replace(asked, stop=["e f"]))
    assert by_text.outputs[0].text == "one two thre" and by_text.outputs[0].stop_reason == "e f"
    stop = whole.outputs[0].token_ids[3]
    [by_id] = generate(llm, ["Count: "], replace(asked, stop_token_ids=[stop]))
    first = whole.outputs[0].token_ids.index(stop)
    assert by_id.outputs[0].token_ids == whole.outputs[0].token_ids[: first + 1]
    assert by_id.outputs[0].stop_reason == stop


@pytest.mark.parametrize("changes", [dict(ignore_eos=True), dict(min_tokens=20), dict(ignore_eos=True, logprobs=1)])
def test_what_is_complete_ends(llm: LLM, changes: dict[str, Any]) -> None:
    choice = StructuredOutputsParams(choice=("yes", "no"))
    [output] = generate(llm, ["Yes? "], SamplingParams(max_tokens=40, structured_outputs=choice, **changes))
    assert output.outputs[0].text in ("yes", "no") and output.outputs[0].finish_reason == "stop"


def test_what_is_complete_behind_forced_tokens_ends_there(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=("yes of course",))
    asked = SamplingParams(max_tokens=40, ignore_eos=True, structured_outputs=choice)
    before = llm.engine.stats().num_output_tokens
    *_, last = llm.stream("Yes? ", asked)
    [output] = last.outputs
    assert (output.text, output.finish_reason) == ("yes of course", "stop")
    assert llm.engine.stats().num_output_tokens - before == len(output.token_ids)
    # Every token can be seen, and the EOS that the device sampled cannot.
    assert llm.engine.tokenizer is not None
    assert llm.engine.tokenizer.decode(output.token_ids, skip_special_tokens=False) == "yes of course"


def test_guesses_change_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = CASES[::3]
    asked = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[index % 3],
            seed=index,
            max_tokens=(24, 60)[index % 2],
            min_tokens=20 if index % 5 == 0 else 0,
            ignore_eos=index % 7 == 0,
            structured_outputs=StructuredOutputsParams(json=case, disable_any_whitespace=index % 4 == 0),
        )
        for index, case in enumerate(cases)
    ]
    prompts = ["As JSON: "] * len(cases)
    guessed = generate(llm, prompts, asked)
    monkeypatch.setattr(llm.engine.inputs, "_masks_commute", False)
    masked = generate(llm, prompts, asked)
    assert tokens(guessed) == tokens(masked)
    assert [one.outputs[0].finish_reason for one in guessed] == [one.outputs[0].finish_reason for one in masked]


def test_a_wrong_grammar_queues_nothing(llm: LLM) -> None:
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
    for _ in range(2):  # the same error is kept with its grammar
        with pytest.raises(ParameterError, match="^prompt 1: structured_outputs: json has the keyword") as raised:
            generate(llm, ["a", "b"], [SamplingParams(), wrong])
        assert raised.value.param == "structured_outputs"


def test_what_is_ignored_is_a_warning(llm: LLM) -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}, lenient=True))
    lenient, other = generate(llm, ["a", "b"], [asked, SamplingParams()])
    assert lenient.warnings == ['the keyword "not" at # is not enforced'] and other.warnings == []


def test_a_constraint_that_fails_ends_its_request_alone(
    llm: LLM, alone: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = StructuredOutputsParams(choice=("a" * 30,))
    doomed = SamplingParams(structured_outputs=choice, max_tokens=40, logprobs=0)

    class Broken(GrammarConstraint):
        def fill(self, words: Any) -> None:
            if self._matcher is not None:
                raise RuntimeError("a limit was met")
            super().fill(words)

    class AlsoBroken(GrammarConstraint):
        def advance(self, token_ids: Any) -> None:
            raise RuntimeError("a limit was met")

    make = llm.engine.inputs.constraints
    assert make is not None
    for broken in (Broken, AlsoBroken):
        with monkeypatch.context() as patch:
            constraint = type(make).constraint

            def breaking(self: Any, request: Any, grammar: Any, broken: Any = broken, real: Any = constraint) -> Any:
                return broken(grammar) if request.params.max_tokens == 40 else real(self, request, grammar)

            patch.setattr(type(make), "constraint", breaking)
            *others, failed = generate(llm, [*PROMPTS, "x"], [*MIXED, doomed])
        assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].stop_reason == "a limit was met"
        assert tokens(others) == alone
    [healthy] = generate(llm, ["x"], doomed)
    assert healthy.outputs[0].text == "a" * 30


def test_aborts_change_nothing_for_others(llm: LLM, alone: list[list[list[int]]]) -> None:
    engine = llm.engine
    for index, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        engine.submit(engine.check(str(index), prompt, params))
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        steps += 1
        if steps % 2 == 0 and steps <= 8:
            engine.abort(str(steps))
        engine.replicas[0].scheduler.check_invariants()
    left = [index for index in range(18) if index not in (2, 4, 6, 8)]
    assert tokens([outputs[str(index)] for index in left]) == [alone[index] for index in left]


def test_the_answer_behind_the_reasoning_has_its_form(demo: LLM) -> None:
    """The demo model does not think, so these marks are tokens that it knows."""
    from jaxvllm.grammar.request_constraints import RequestConstraints

    engine = demo.engine
    assert engine.tokenizer is not None
    marks = ReasoningFormat("<tool_call>", "</tool_call>", is_open=True)
    before, engine.inputs.constraints = (
        engine.inputs.constraints,
        RequestConstraints(engine.tokenizer, engine.vocab_size, engine.eos_token_ids, marks, lenient=False),
    )
    rules = engine.inputs.rules
    engine.inputs.rules = replace(rules, has_reasoning=True)
    try:
        choice = StructuredOutputsParams(choice=("yes", "no"))
        asked = SamplingParams(
            max_tokens=40, thinking_token_budget=7, structured_outputs=choice, seed=1, ignore_eos=True
        )
        outputs = generate(demo, ["Is it? ", "Was it? "], [asked, replace(asked, thinking_token_budget=0)])
        for output, budget in zip(outputs, (7, 0), strict=True):
            [completion] = output.outputs
            assert completion.token_ids.index(2047) == budget
            assert engine.tokenizer.decode(completion.token_ids[budget + 1 :]) in ("yes", "no")
    finally:
        assert engine.inputs.constraints is not None
        engine.inputs.constraints.close()
        engine.inputs.constraints, engine.inputs.rules = before, rules
    with pytest.raises(ParameterError, match="reasoning-parser"):
        generate(demo, ["x"], SamplingParams(thinking_token_budget=3))
