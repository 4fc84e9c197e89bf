import copy
import math
import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxvllm.core.errors import ContextLengthError, ParameterError, UnsupportedParameterError
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.core.structured_outputs import StructuredOutputsParams


def test_defaults_are_vllm_s() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (None, (), (), False)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.detokenize) == (16, 0, None, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_loose_forms_have_one_normal_form() -> None:
    loose = SamplingParams(
        temperature=np.float32(0.5),
        top_k=-1,
        stop="END",
        stop_token_ids=[np.int64(3)],
        n=np.int32(2),
        max_tokens=None,
    )
    assert loose == SamplingParams(temperature=0.5, stop=("END",), stop_token_ids=(3,), n=2, max_tokens=None)
    assert type(loose.n) is int and type(loose.temperature) is float and type(loose.stop_token_ids[0]) is int
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams(stop=[], stop_token_ids=[])
    hash(loose)


def test_copies_are_equal() -> None:
    params = SamplingParams(seed=3, stop=["a"], top_k=5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"temperature": bad}, "temperature must be a number from 0 to 1e") for bad in (-0.1, 1e7, 10**400)],
        *[({"temperature": bad}, "temperature must be a number") for bad in (math.nan, math.inf, "1", True, None)],
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0: for greedy set temperature=0"),
        *[({"top_p": bad}, "top_p must be a number from 0 to 1, not") for bad in (1.01, -1, math.nan, "x")],
        *[({"top_k": bad}, "top_k must be an integer from -1 to") for bad in (-2, 2**31, 1.0, True)],
        *[({"min_p": bad}, "min_p must be a number from 0 to 1, not") for bad in (-0.1, 1.1, math.nan)],
        *[({"n": bad}, "n must be an integer from 1 to 16384, not") for bad in (0, -1, 10**9, 1.5, True, "2")],
        *[({"seed": bad}, "seed must be an integer from") for bad in (2**63, -(2**63) - 1, 1.0, False)],
        ({"stop": ["x"] * 10_000}, "stop has 10000 strings, the limit is 64: give fewer"),
        ({"stop": ["a", ""]}, "a stop string must have 1 to 1024 characters, not 0"),
        ({"stop": "x" * 1025}, "a stop string must have 1 to 1024 characters, not 1025"),
        ({"stop": ["a", 3]}, r"stop must be a string or a list of strings, not a list with 3 \(int\)"),
        ({"stop": 3}, r"stop must be a string or a list of strings, not 3 \(int\)"),
        ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
        ({"stop_token_ids": list(range(31))}, "stop_token_ids has 31, the limit is 30: give fewer"),
        *[({"stop_token_ids": bad}, "a stop token id must be an integer") for bad in ([-1], [2**31], [1.5], ["a"])],
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids"),
        *[({"max_tokens": bad}, "max_tokens must be an integer from 1") for bad in (0, -1, 1.5, "9")],
        *[({"min_tokens": bad}, "min_tokens must be an integer from 0") for bad in (-1, None, 2.0)],
        ({"min_tokens": 17}, "min_tokens 17 exceeds max_tokens 16: lower it, or raise max_tokens"),
        *[({"logprobs": bad}, "logprobs must be an integer from -1 to 2147483647, not") for bad in (-2, 2**31, True)],
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 1.17549e-38 to 1e"),
        ({"presence_penalty": -2.1}, "presence_penalty must be a number from -2 to 2, not -2.1"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number from -2 to 2, not '1'"),
        ({"logit_bias": [1]}, "logit_bias must be an object from token ids to numbers"),
        ({"logit_bias": {"one": 1.0}}, "logit_bias: a token id must be an integer from 0 to"),
        ({"logit_bias": {1: "x"}}, "logit_bias must be a number from"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 tokens, the limit is 1024"),
        ({"allowed_token_ids": []}, "allowed_token_ids must have at least one token"),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids\[0\]: an allowed token must be an integer from 0 to"),
        ({"bad_words": [""]}, "a bad word must have 1 to 1024 characters, not 0"),
        ({"bad_words": ["a"] * 129}, "bad_words has 129 strings, the limit is 128"),
        ({"structured_outputs": {}}, "structured_outputs needs exactly one of json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of .* not regex and choice"),
        ({"structured_outputs": {"regex": "\ud800"}}, "regex must be valid Unicode"),
        ({"structured_outputs": {"choice": ["a", "\ud800"]}}, "choice must be valid Unicode"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "\udfff"}},
            "whitespace_pattern must be valid Unicode",
        ),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs has no 'yaml'"),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be an integer from -1 to"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "min_count must be at least 2, not 0"),
        ({"repetition_detection": {"min_pattern_size": 3, "min_count": 2}}, "min_pattern_size 3 exceeds"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids has 129, the limit is 128"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1, not 0"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, not None"),
        ({"output_kind": "delta"}, "output_kind must be a RequestOutputKind, not 'delta'"),
    ],
)
def test_bad_values(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options)


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-46, 1e-45, 1e-39, 1.17e-38])
def test_what_float32_cannot_hold_means_its_limit(tiny: float) -> None:
    """Devices flush such values to 0, which would exclude every token as top_p."""
    params = SamplingParams(temperature=tiny, top_p=tiny, min_p=tiny)
    assert params.greedy
    assert np.float32(params.top_p) == np.finfo(np.float32).smallest_normal
    assert params.min_p == 0
    assert (SamplingParams(top_p=1.2e-38).top_p, SamplingParams(min_p=1.2e-38).min_p) == (1.2e-38, 1.2e-38)


@given(temperature=st.floats(), top_p=st.floats(), min_p=st.floats())
def test_every_float_is_refused_or_one_that_float32_holds(temperature: float, top_p: float, min_p: float) -> None:
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        try:
            params = SamplingParams(**{name: value})
        except ValueError as error:
            assert name in str(error)
            continue
        held = np.float32(getattr(params, name))
        assert np.isfinite(held)
        assert held == 0 or held >= np.finfo(np.float32).smallest_normal or params.greedy
        assert params.top_p > 0 and np.float32(params.top_p) > 0


def test_nothing_is_generated_only_where_the_prompt_is_scored() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).scores_only
    assert not SamplingParams(max_tokens=1, prompt_logprobs=0).scores_only
    assert SamplingParams(max_tokens=0, prompt_logprobs=2, n=2).child(1).scores_only
    with pytest.raises(ValueError, match="min_tokens 1 exceeds max_tokens 0"):
        SamplingParams(max_tokens=0, min_tokens=1, prompt_logprobs=0)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"spaces_between_special_tokens": False, "skip_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)
def test_an_error_knows_the_name_of_its_parameter(options: dict[str, Any], param: str) -> None:
    with pytest.raises((ParameterError, UnsupportedParameterError)) as raised:
        SamplingParams(**options)
    assert raised.value.param == param


def test_an_error_quotes_little_of_a_large_value() -> None:
    with pytest.raises(ValueError) as raised:
        SamplingParams(temperature="9" * 10**6)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 200


def test_limits_are_inclusive() -> None:
    SamplingParams(
        n=16_384, temperature=0, top_k=2**31 - 1, min_p=1, seed=-(2**63), stop=["x" * 1024] * 64, logprobs=20
    )
    SamplingParams(stop_token_ids=[0] * 30, max_tokens=5, min_tokens=5, logprobs=0, seed=2**63 - 1)


@pytest.mark.parametrize("name", ["guided_decoding", "use_beam_search", "length_penalty"])
def test_what_vllm_has_elsewhere_is_named(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"SamplingParams.{name} is not supported: "):
        SamplingParams(**{name: 1})


def test_values_have_one_stored_form() -> None:
    stored = SamplingParams(
        logit_bias={"7": 200, 3: -1}, bad_words="x", allowed_token_ids=[2], thinking_token_budget=-1
    )
    assert stored == SamplingParams(logit_bias=((3, -1.0), (7, 100.0)), bad_words=["x"], allowed_token_ids=(2,))
    schema = SamplingParams(structured_outputs={"json": {"type": "object"}}).structured_outputs
    assert schema == StructuredOutputsParams(json='{"type": "object"}') and schema.kind == "json"


def test_what_best_of_asks_for() -> None:
    assert (SamplingParams(n=2, best_of=3).num_sequences, SamplingParams(n=2).num_sequences) == (3, 2)
    assert SamplingParams(n=2, best_of=2) == SamplingParams(n=2)
    child = SamplingParams(best_of=3, seed=5).child(2)
    assert (child.n, child.best_of, child.seed, child.logprobs) == (1, None, 7, 0)
    with pytest.raises(ParameterError, match="best_of 2 is less than n 3: raise it, or lower n"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(ParameterError, match="best_of 2 cannot stream"):
        SamplingParams(best_of=2, output_kind=RequestOutputKind.DELTA)


def test_extra_args_are_kept_and_never_read() -> None:
    given = {"a": [1]}
    assert SamplingParams(extra_args=given, skip_clone=True).extra_args == given
    with pytest.raises(ParameterError, match="extra_args must be a mapping"):
        SamplingParams(extra_args={1: 2})  # type: ignore[dict-item]
    with pytest.raises(UnsupportedParameterError, match="kv_transfer_params is not supported"):
        SamplingParams(extra_args={"kv_transfer_params": {}})


def test_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-3).greedy


def test_children_draw_apart() -> None:
    parent = SamplingParams(n=3, seed=2**63 - 1, top_k=7)
    children = [parent.child(i) for i in range(3)]
    assert [child.seed for child in children] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert {(child.n, child.top_k) for child in children} == {(1, 7)}
    assert SamplingParams(n=2).child(1).seed is None
    alone = SamplingParams(seed=4)
    assert alone.child(0) is alone


def test_one_child_scores_the_prompt_for_all() -> None:
    parent = SamplingParams(n=3, prompt_logprobs=2, logprobs=1)
    assert [parent.child(i).prompt_logprobs for i in range(3)] == [2, None, None]
    assert {parent.child(i).logprobs for i in range(3)} == {1}


def test_seed_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None


def test_zero_tokens_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="not 0: 0 only scores the prompt, and needs prompt_logprobs"):
        SamplingParams(max_tokens=0)


def test_errors_survive_pickling() -> None:
    numbers = dict(num_tokens=9, max_prompt_tokens=7, max_model_len=8, num_chars=30)
    errors = [
        ContextLengthError("too long", **numbers),
        ParameterError("wrong", "stop"),
        UnsupportedParameterError("x", "y"),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
