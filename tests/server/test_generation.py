"""How many log-probabilities one answer may have."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxvllm.core.request import Prompt
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.server.generation import MAX_LOGPROB_ENTRIES, _bounded
from jaxvllm.text.prompts import PromptReader

LENGTH = 131_072
READER = PromptReader(None, 1000, LENGTH)
SHORT = Prompt("a", np.zeros(1000, np.int32))
WHOLE = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)


def entries(params: SamplingParams) -> int:
    assert params.logprobs is not None and params.max_tokens is not None
    return params.n * (params.logprobs + 1) * params.max_tokens


def test_who_asks_for_none_is_not_bounded() -> None:
    for params in (WHOLE, replace(WHOLE, n=16_384, max_tokens=LENGTH)):
        assert _bounded(params, [SHORT], READER) is params


@pytest.mark.parametrize(("n", "count"), [(1, 0), (1, 20), (4, 5), (1000, 20), (16_384, 20)])
def test_without_max_tokens_the_answer_is_bounded(n: int, count: int) -> None:
    params = _bounded(replace(WHOLE, n=n, logprobs=count, min_tokens=100_000), [SHORT], READER)
    assert params.max_tokens is not None and 1 <= params.max_tokens <= LENGTH - 1000
    assert params.min_tokens <= params.max_tokens
    assert entries(params) <= MAX_LOGPROB_ENTRIES
    assert params.max_tokens == LENGTH - 1000 or entries(params) > MAX_LOGPROB_ENTRIES - n * (count + 1)


@pytest.mark.parametrize(("options", "of_each"), [({"logprobs": -1}, 1001), ({"logprob_token_ids": [5, 6]}, 3)])
def test_the_whole_vocabulary_and_named_tokens_count(options: dict[str, Any], of_each: int) -> None:
    most = min(MAX_LOGPROB_ENTRIES // of_each, LENGTH - 1000)
    assert _bounded(replace(WHOLE, **options), [SHORT], READER).max_tokens == most


def test_with_max_tokens_it_is_refused() -> None:
    fits = replace(WHOLE, logprobs=0, max_tokens=100_000, n=5)
    assert _bounded(fits, [SHORT], READER) is fits
    with pytest.raises(ValueError, match="logprobs of up to 600000 tokens are asked for, and the most is 524288"):
        _bounded(replace(fits, n=6), [SHORT], READER)
    with pytest.raises(ValueError, match="the most is"):
        _bounded(fits, [SHORT, SHORT], READER)


def test_a_stream_is_sent_as_it_comes() -> None:
    params = replace(WHOLE, logprobs=20, n=1000, output_kind=RequestOutputKind.DELTA)
    assert _bounded(params, [SHORT], READER) is params


def test_prompts_count_too() -> None:
    scored = replace(WHOLE, prompt_logprobs=20, output_kind=RequestOutputKind.DELTA)
    assert _bounded(scored, [SHORT] * 24, READER) is scored
    with pytest.raises(ValueError, match="logprobs of up to 525000 tokens"):
        _bounded(scored, [SHORT] * 25, READER)
    whole = replace(scored, prompt_logprobs=-1)
    assert _bounded(whole, [replace(SHORT, token_ids=SHORT.token_ids[:500])], READER) is not None
    with pytest.raises(ValueError, match="prompt_logprobs of up to 1001000 tokens"):
        _bounded(whole, [SHORT], READER)
    both = _bounded(replace(WHOLE, prompt_logprobs=20, logprobs=20), [SHORT] * 24, READER)
    assert both.max_tokens == (MAX_LOGPROB_ENTRIES - 24 * 21_000) // (24 * 21)
