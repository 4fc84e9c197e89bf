"""An explanation tells what the engine did: chunks, pages, bursts, masks, and what became of a request."""

from dataclasses import replace
from typing import Any

import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.core import explanation as explanation_module
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine import step_recorder
from jaxvllm.engine.exported_request import ExportedRequest
from tests.engine.explained import explained, explanation_of
from tests.engine.tiny import GREEDY, few_pages, random_prompts

LONG = [list(range(2, 42))]  # 40 tokens: three chunks of 16


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token(llm: LLM) -> None:
    [[completion]] = explained(llm, LONG, replace(GREEDY, logprobs=3, max_tokens=9))
    explanation = explanation_of(completion)
    assert [step.query_length for step in explanation.steps] == [16, 16, 8, *[1] * 8]
    assert [step.kind for step in explanation.steps] == ["prefill"] * 3 + ["decode"] * 8
    assert [step.num_tokens for step in explanation.steps] == [0, 0, *[1] * 9]
    assert all(len(token.candidates) in (3, 4) and token.origin == "sampled" for token in explanation.tokens)
    assert explanation.steps[0].batch.num_padding == 0 and explanation.steps[-1].batch.num_rows == 1
    assert explanation.total_seconds is not None and explanation.first_token_seconds is not None
    assert 0 <= explanation.first_token_seconds <= explanation.total_seconds


def test_requests_in_one_batch_share_steps_and_pages(llm: LLM) -> None:
    size = llm.engine.replicas[0].scheduler.cache.page_size
    prompts = [[*LONG[0], 60], [*LONG[0], 61], *random_prompts(7, longest=20, seed=4)]
    outputs = explained(llm, prompts, replace(GREEDY, max_tokens=6))
    first, second, *others = [explanation_of(one) for [one] in outputs]
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == 40 // size * size
    of_first, of_second = first.steps[0].admitted, second.steps[0].admitted
    assert of_first is not None and of_second is not None
    assert of_first.pages[: 40 // size] == of_second.pages[: 40 // size]
    batches = {step.batch.number: step.batch for one in (first, second, *others) for step in one.steps}
    for number, batch in batches.items():  # all that runs is explained here
        steps = [step for one in (first, second, *others) for step in one.steps if step.batch.number == number]
        assert batch.num_rows == len(steps)
        assert batch.num_tokens == sum(step.query_length for step in steps)
    plain = llm.generate(prompts, replace(GREEDY, max_tokens=6), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in plain] == [one.token_ids for [one] in outputs]
    assert all(one.outputs[0].explanation is None for one in plain)


def test_a_preempted_request_tells_so(llm: LLM) -> None:
    with few_pages(llm, 7):
        outputs = explained(llm, random_prompts(4, longest=30, seed=6), replace(GREEDY, max_tokens=40))
    admitted = [step.admitted for [one] in outputs for step in explanation_of(one).steps if step.admitted]
    assert max(one.num_preemptions for one in admitted) > 0


def test_bursts_and_several_completions_add_up(bursting: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=30, logprobs=2, ignore_eos=True)
    [completions] = explained(bursting, LONG, params)
    assert len(completions) == 3
    assert any(len(step.decodes) > 1 for one in completions for step in explanation_of(one).steps)
    assert len({tuple(one.token_ids) for one in completions}) > 1


@pytest.mark.parametrize("logprobs", [None, 2])
def test_masks_leave_what_the_grammar_allows(llm: LLM, logprobs: int | None) -> None:
    choices = ("yes", "nothing", "no")
    params = replace(GREEDY, structured_outputs=StructuredOutputsParams(choice=choices), logprobs=logprobs)
    [[completion]] = explained(llm, [[5, 6, 7]], replace(params, ignore_eos=False))
    explanation = explanation_of(completion)
    spell, eos = llm.get_tokenizer().token_text, llm.engine.eos_token_ids
    texts = {token: spell(token) for token in range(llm.engine.vocab_size) if token not in eos}
    num_masks = 0
    for step in explanation.steps:
        if step.num_allowed is None:
            continue
        num_masks += 1
        # What the last token of the step continues: a mask is that of the one token that it samples.
        done = "".join(texts[one] for one in completion.token_ids[: step.first_output + step.num_tokens - 1])
        allowed = [text for text in texts.values() if text and any(one.startswith(done + text) for one in choices)]
        assert step.num_allowed == len(allowed) + (len(eos) if done in choices else 0)
    assert num_masks
    origins = [token.origin for token in explanation.tokens]
    assert ("forced" in origins) == (logprobs is None)  # a token that is told with candidates is sampled


def test_what_is_in_flight_when_tokens_are_forced_is_kept_or_ignored(llm: LLM) -> None:
    forms = [StructuredOutputsParams(regex=regex) for regex in ("[0-9]{3}-abcdefgh", "[a-c]{2}(xyz|xyzzy)[0-9]+")]
    params = [replace(GREEDY, structured_outputs=form) for form in forms]
    outputs = explained(llm, [[5, 6, 7], [8, 9]], params)
    steps = [step for [one] in outputs for step in explanation_of(one).steps]
    assert any(step.is_dropped and step.writes for step in steps)
    assert any(step.num_refused for step in steps)


def test_stops_scores_and_aborts_are_explained(llm: LLM) -> None:
    [[completion]] = explained(llm, LONG, replace(GREEDY, max_tokens=12))
    whole = completion.text
    stop = whole[5]
    at_stop = llm.engine.check("stopped", LONG[0], replace(GREEDY, stop=[stop]), wants_explanation=True)
    scored = llm.engine.check(
        "scored", LONG[0], SamplingParams(max_tokens=0, prompt_logprobs=0), wants_explanation=True
    )
    cut = llm.engine.check("cut", LONG[0], GREEDY, wants_explanation=True)
    for request in (at_stop, scored, cut):
        llm.engine.submit(request)
    outputs = {}
    while not {"stopped", "scored"} <= outputs.keys():
        outputs |= {one.request_id: one for one in llm.engine.step() if one.finished}
    aborted = llm.engine.abort("cut")
    while llm.engine.has_work:
        llm.engine.step()
    assert aborted is not None
    outputs["cut"] = aborted
    told = {name: explanation_of(one.outputs[0]) for name, one in outputs.items()}
    assert told["stopped"].stop_reason == stop and told["cut"].finish_reason == "abort"
    assert [len(one.tokens) for one in told.values()] == [len(outputs[name].outputs[0].token_ids) for name in told]
    assert told["scored"].tokens == () and told["scored"].steps


def test_steps_are_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation_module, "MAX_STEPS", 4)
    [[completion]] = explained(llm, LONG, replace(GREEDY, max_tokens=10))
    explanation = explanation_of(completion)
    assert (len(explanation.steps), explanation.num_steps_left_out) == (4, 8)
    assert len(explanation.tokens) == 10 and all(token.origin == "sampled" for token in explanation.tokens)


def test_nothing_is_noted_for_those_who_do_not_ask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a step was noted")

    monkeypatch.setattr(step_recorder, "StepNotes", refuse)
    llm.generate(LONG, GREEDY, use_tqdm=False)
    with pytest.raises(AssertionError, match="noted"):
        explained(llm, LONG, GREEDY)


def test_others_are_only_counted(llm: LLM) -> None:
    asked = llm.engine.check("asks", LONG[0], replace(GREEDY, max_tokens=8), wants_explanation=True)
    silent = llm.engine.check("does not", [50, 51, 52], replace(GREEDY, max_tokens=8))
    for request in (asked, silent):
        llm.engine.submit(request)
    outputs = {}
    while llm.engine.has_work:
        outputs |= {one.request_id: one.outputs[0] for one in llm.engine.step()}
    assert outputs["does not"].explanation is None
    explanation = explanation_of(outputs["asks"])
    assert max(step.batch.num_rows for step in explanation.steps) == 2
    assert "does not" not in repr(explanation)


def test_a_request_from_another_engine_begins_where_it_came(llm: LLM) -> None:
    [[whole]] = explained(llm, LONG, replace(GREEDY, max_tokens=12))
    llm.engine.submit(llm.engine.check("moves", LONG[0], replace(GREEDY, max_tokens=12), wants_explanation=True))
    for _ in range(7):
        llm.engine.step()
    exported = ExportedRequest.from_bytes(llm.engine.export_request("moves").to_bytes())
    llm.engine.import_request(exported)
    outputs = []
    while llm.engine.has_work:
        outputs += llm.engine.step()
    [completion] = outputs[-1].outputs
    assert completion.token_ids == whole.token_ids
    origins = [token.origin for token in explanation_of(completion).tokens]
    assert 0 < origins.count("imported") < 12 and sorted(origins) == origins


def test_a_beam_search_is_not_explained(llm: LLM) -> None:
    search = BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(ParameterError, match="cannot be explained"):
        llm.engine.check("a", LONG[0], GREEDY, beam_search=search, wants_explanation=True)
