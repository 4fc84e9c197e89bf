"""Sampling parameters that the host alone computes: what it reads, what it keeps, and when it ends a completion."""

from dataclasses import replace
from typing import Any

import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.core.errors import ContextLengthError, ParameterError
from jaxvllm.core.sampling_params import RepetitionDetectionParams, RequestOutputKind
from jaxvllm.engine.outputs import CompletionOutput, FlatLogprobs
from tests.core.test_repetition import ends_with_repetition
from tests.engine.tiny import GREEDY, MAX_MODEL_LEN

PROMPT = list(range(40, 80))
# Nearly uniform over some 300 tokens: some of these completions have the same token twice in a row.
WILD = SamplingParams(temperature=20.0, seed=1, n=24, max_tokens=70, ignore_eos=True)
TWICE = RepetitionDetectionParams(max_pattern_size=2, min_count=2)


def completions(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[CompletionOutput]:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs


# The prompt.


def test_a_request_may_compute_a_cached_prompt_anew(llm: LLM) -> None:
    def cached(**options: Any) -> tuple[int, list[int]]:
        [output] = llm.generate([PROMPT], replace(GREEDY, **options), use_tqdm=False)
        return output.num_cached_tokens, output.outputs[0].token_ids

    first, *others = [cached(), cached(skip_reading_prefix_cache=True), cached(skip_reading_prefix_cache=False)]
    assert first[0] == others[0][0] == 0 and others[1][0] == 32
    assert first[1] == others[0][1] == others[1][1]


def test_completions_that_skip_the_cache_do_not_wait_for_each_other(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 3, replace(GREEDY, skip_reading_prefix_cache=True), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize(
    ("kept", "max_tokens", "count"),
    [(5, 4, 5), (40, 4, 40), (MAX_MODEL_LEN, 4, 40), (-1, 4, 40), (-1, 120, 8), (-1, 127, 1), (-1, None, 40)],
)
def test_the_last_tokens_of_a_prompt_are_kept(llm: LLM, kept: int, max_tokens: int | None, count: int) -> None:
    params = replace(GREEDY, max_tokens=max_tokens, truncate_prompt_tokens=kept)
    request = llm.engine.check("r", PROMPT, params)
    assert request.prompt.token_list == PROMPT[-count:]


def test_a_text_longer_than_the_model_is_truncated(llm: LLM) -> None:
    text = "Once upon a time " * 2000
    with pytest.raises(ContextLengthError):
        llm.engine.check("r", text, GREEDY)
    tail = llm.get_tokenizer().encode(text, add_special_tokens=False)[-9:]
    kept = llm.engine.check("r", text, replace(GREEDY, truncate_prompt_tokens=9)).prompt
    assert kept.token_list == tail and kept.text == text
    assert llm.engine.check("r", text, replace(GREEDY, truncate_prompt_tokens=-1)).prompt.token_list[-9:] == tail


def test_a_truncation_that_cannot_help_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="truncate_prompt_tokens 129 exceeds max_model_len 128") as raised:
        llm.engine.check("r", PROMPT, replace(GREEDY, truncate_prompt_tokens=MAX_MODEL_LEN + 1))
    assert raised.value.param == "truncate_prompt_tokens"
    with pytest.raises(ParameterError, match="max_tokens 128 leaves no room for a prompt"):
        llm.engine.check("r", PROMPT, replace(GREEDY, max_tokens=MAX_MODEL_LEN, truncate_prompt_tokens=-1))


# Repetition.


def first_repetition(tokens: list[int], min_tokens: int = 0) -> int | None:
    counts = range(max(min_tokens, 1), len(tokens) + 1)
    return next((count for count in counts if ends_with_repetition(tokens[:count], TWICE)), None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_tokens": 40},
        {"logprobs": 1},
        {"stop": ["zzzz"]},
        {"output_kind": RequestOutputKind.CUMULATIVE},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["llm", "bursting"])
def test_a_completion_ends_where_it_repeats_itself(
    engine: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(engine)
    # Before min_tokens no EOS is drawn, although it is ignored.
    free = completions(llm, replace(WILD, min_tokens=options.get("min_tokens", 0)))
    before = llm.engine.stats().num_output_tokens
    cut = completions(llm, replace(WILD, repetition_detection=TWICE, **options))
    ends = [first_repetition(one.token_ids, options.get("min_tokens", 0)) for one in free]
    assert 3 <= sum(end is not None and end < 70 for end in ends) < 24
    for one, whole, end in zip(cut, free, ends, strict=True):
        if end is None or end == 70:  # the length comes first
            assert (one.token_ids, one.finish_reason, one.stop_reason) == (whole.token_ids, "length", None)
        else:
            assert one.token_ids == whole.token_ids[:end]
            assert (one.finish_reason, one.stop_reason) == ("repetition", "repetition_detected")
            assert one.text == llm.get_tokenizer().decode(one.token_ids)
            assert one.logprobs is None or len(one.logprobs) == end
    assert llm.engine.stats().num_output_tokens - before == sum(len(one.token_ids) for one in cut)


def test_the_length_comes_before_a_repetition(llm: LLM) -> None:
    whole = next(one for one in completions(llm, WILD) if first_repetition(one.token_ids) is not None)
    end = first_repetition(whole.token_ids)
    one = completions(llm, replace(WILD, repetition_detection=TWICE, max_tokens=end))[whole.index]
    assert (one.token_ids, one.finish_reason, one.stop_reason) == (whole.token_ids[:end], "length", None)


# Which completions come back, and how.


def test_the_best_of_several_come_back_best_first(llm: LLM) -> None:
    params = replace(WILD, n=6, max_tokens=9)
    everything = completions(llm, replace(params, logprobs=0))
    best = sorted(everything, key=lambda one: -(one.cumulative_logprob or 0))
    for count in (1, 3):
        chosen = completions(llm, replace(params, n=count, best_of=6))
        assert [one.index for one in chosen] == list(range(count))
        assert [one.token_ids for one in chosen] == [one.token_ids for one in best[:count]]
        assert [one.text for one in chosen] == [one.text for one in best[:count]]
        assert [one.cumulative_logprob for one in chosen] == pytest.approx(
            [one.cumulative_logprob for one in best[:count]]
        )
        assert all(one.logprobs is None for one in chosen)
    [shown] = completions(llm, replace(params, n=1, best_of=6, logprobs=2))
    assert shown.logprobs is not None and len(shown.logprobs) == 9


def test_the_best_are_shown_only_at_the_end(llm: LLM) -> None:
    params = replace(WILD, n=2, best_of=4, max_tokens=5, output_kind=RequestOutputKind.CUMULATIVE)
    [only] = llm.stream(PROMPT, params)
    assert only.finished and len(only.outputs) == 2


def test_flat_log_probabilities_are_the_same(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=6)
    [plain], [flat] = (
        llm.generate([PROMPT], replace(params, flat_logprobs=is_flat), use_tqdm=False) for is_flat in (False, True)
    )
    got, scores = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(got, FlatLogprobs) and isinstance(scores, FlatLogprobs)
    assert plain.outputs[0].logprobs is not None and plain.prompt_logprobs is not None
    assert list(got) == plain.outputs[0].logprobs and list(got[1:3]) == plain.outputs[0].logprobs[1:3]
    assert got[-1] == plain.outputs[0].logprobs[-1]
    assert [ranked or None for ranked in scores] == plain.prompt_logprobs


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_outputs_of_a_stream_wait_for_several_tokens(llm: LLM, kind: RequestOutputKind) -> None:
    params = replace(GREEDY, max_tokens=12, stream_interval=5, output_kind=kind)
    outputs = [output.outputs[0] for output in llm.stream(PROMPT, params)]
    counts = [len(output.token_ids) for output in outputs]
    assert counts == ([1, 5, 5, 1] if kind is RequestOutputKind.DELTA else [1, 6, 11, 12])
    whole = completions(llm, replace(GREEDY, max_tokens=12))[0].text
    assert (outputs[-1].text if counts[-1] == 12 else "".join(output.text for output in outputs)) == whole
