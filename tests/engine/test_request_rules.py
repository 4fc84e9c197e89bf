"""Which requests an engine takes, what ends them, and how long they may become."""

from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest, Prompt, RequestOptions
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.request_rules import RequestRules

RULES = RequestRules(max_model_len=64, eos_token_ids=(2, 3), vocab_size=100, takes_priorities=False)
ANY_PRIORITY = RequestRules(max_model_len=64, eos_token_ids=(2, 3), vocab_size=100, takes_priorities=True)


def request(priority: Any = 0, **params: Any) -> GenerationRequest:
    return GenerationRequest("r", Prompt(None, np.arange(10, dtype=np.int32)), SamplingParams(**params), priority)


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"max_tokens": 5}, 15),
        ({"max_tokens": 54}, 64),
        ({"max_tokens": 1000}, 64),
        ({"max_tokens": None}, 64),
        ({"max_tokens": 0, "prompt_logprobs": 1}, 11),
    ],
)
def test_how_long_a_request_may_become(params: dict[str, Any], limit: int) -> None:
    assert RULES.limit(request(**params)) == limit


def test_eos_ends_a_request_unless_it_is_ignored() -> None:
    assert RULES.stop_token_ids(SamplingParams(stop_token_ids=[9, 2, 5])) == (2, 3, 9, 5)
    assert RULES.stop_token_ids(SamplingParams(stop_token_ids=[9, 2, 5], ignore_eos=True)) == (9, 2, 5)


@pytest.mark.parametrize("priority", [True, 1.0, None, "1"])
def test_a_priority_is_an_integer(priority: Any) -> None:
    with pytest.raises(ParameterError, match="priority must be an integer, not") as raised:
        ANY_PRIORITY.check(request(priority))
    assert raised.value.param == "priority"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("logit_bias", {"99": 1.0}, {5: 1.0, 100: 2.0}),
        ("allowed_token_ids", [0, 99], [0, 100]),
    ],
)
def test_tokens_are_in_the_vocabulary(name: str, good: Any, bad: Any) -> None:
    RULES.check(request(**{name: good}))
    with pytest.raises(ParameterError, match=f"{name}: token id 100 is outside the vocabulary of 100 tokens") as raised:
        RULES.check(request(**{name: bad}))
    assert raised.value.param == name


@pytest.mark.parametrize("bad", [-1, 21])
def test_log_probabilities_are_bounded(bad: int) -> None:
    with pytest.raises(ParameterError, match="logprobs must be an integer from 0 to 20, not"):
        RULES.check(request(logprobs=bad))


def test_priorities_need_the_policy() -> None:
    RULES.check(request(0))
    ANY_PRIORITY.check(request(-5))
    with pytest.raises(ParameterError, match="priority -5 needs an engine with scheduling_policy='priority'"):
        RULES.check(request(-5))


def test_stop_tokens_and_eos_together_are_bounded() -> None:
    most = request(stop_token_ids=list(range(10, 40)))
    RULES.check(most)
    many_eos = RequestRules(max_model_len=64, eos_token_ids=(1, 2, 3), vocab_size=100, takes_priorities=False)
    with pytest.raises(ParameterError, match="EOS and stop_token_ids are more than 32 tokens together") as raised:
        many_eos.check(most)
    assert raised.value.param == "stop_token_ids"


def test_a_request_of_several_completions_is_shared_out_with_one_prompt() -> None:
    alone = request(seed=7)
    assert alone.sequences() == (alone,)
    several = GenerationRequest("r", alone.prompt, SamplingParams(n=3, seed=7), 4)
    sequences = several.sequences()
    assert [one.request_id for one in sequences] == ["r#0", "r#1", "r#2"]
    assert [one.params.seed for one in sequences] == [7, 8, 9]
    assert all(one.prompt is several.prompt and one.priority == 4 and one.params.n == 1 for one in sequences)


def test_the_optional_fields_of_a_request_are_options() -> None:
    optional = {field.name for field in fields(GenerationRequest) if field.default is not MISSING}
    assert optional == set(RequestOptions.__annotations__)
