"""What a user says of speculation is read by vLLM's names, and anything else is an error that says what to write."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from jaxvllm.config import PAGE_SIZES, EngineConfig
from jaxvllm.core.speculative_config import DEFAULT_SPECULATION, MAX_DRAFTS, SpeculativeConfig

WHOLE = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 4}


@pytest.mark.parametrize("value", [WHOLE, json.dumps(WHOLE), f"\n {json.dumps(WHOLE)} "])
def test_has_vllms_names(value: object) -> None:
    config = SpeculativeConfig.read(value)
    assert (config.method, config.num_speculative_tokens) == ("ngram", 5)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 4)


def test_the_method_is_enough() -> None:
    assert SpeculativeConfig.read({"method": "ngram"}) == SpeculativeConfig("ngram")


def test_what_it_prints_is_what_it_reads() -> None:
    config = SpeculativeConfig("ngram", None, MAX_DRAFTS, 1, 32)
    assert SpeculativeConfig.read(str(config)) == config
    assert json.loads(str(config)) == asdict(config)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("method", "medusa_", "method must be one of ngram"),
        ("method", None, "needs a method, or a model that tells it"),
        ("num_speculative_tokens", 0, "from 1 to 15, not 0"),
        ("num_speculative_tokens", MAX_DRAFTS + 1, "from 1 to 15, not 16"),
        ("num_speculative_tokens", "3", "from 1 to 15, not '3'"),
        ("num_speculative_tokens", 3.0, r"from 1 to 15, not 3\.0"),
        ("num_speculative_tokens", True, "from 1 to 15, not True"),
        ("num_speculative_tokens", None, "from 1 to 15, not None"),
        ("prompt_lookup_max", 0, "prompt_lookup_max must be from 1 to 32, not 0"),
        ("prompt_lookup_max", 33, "prompt_lookup_max must be from 1 to 32, not 33"),
        ("prompt_lookup_min", 0, "prompt_lookup_min must be from 1 to 4, not 0"),
        ("prompt_lookup_min", 5, "prompt_lookup_min must be from 1 to 4, not 5"),
        ("suffix_decoding_max_tree_depth", 0, "suffix_decoding_max_tree_depth must be from 1 to 64, not 0"),
        ("suffix_decoding_max_tree_depth", 24.0, r"must be from 1 to 64, not 24\.0"),
        (
            "suffix_decoding_max_spec_factor",
            -1,
            "suffix_decoding_max_spec_factor must be a number from 0 to 64, not -1",
        ),
        ("suffix_decoding_max_spec_factor", True, "must be a number from 0 to 64, not True"),
        ("num_drafts", 3, "has no 'num_drafts': it may have method, model, num_speculative_tokens"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^speculative_config .*{rule}.*an example: ") as error:
        SpeculativeConfig.read({**WHOLE, name: value})
    example = str(error.value).partition("an example: ")[2]
    assert SpeculativeConfig.read(example) == SpeculativeConfig("ngram")


@pytest.mark.parametrize("value", ["ngram", "", '"ngram"', "{", 3, None, ["ngram"], "null", "{'method': 'ngram'}"])
def test_what_is_no_object_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="speculative_config must be a JSON object, not "):
        SpeculativeConfig.read(value)


@pytest.mark.parametrize("value", ["{}", {"num_speculative_tokens": 3}])
def test_a_method_must_be_named(value: object) -> None:
    with pytest.raises(ValueError, match="speculative_config needs a method"):
        SpeculativeConfig.read(value)


def test_a_model_may_tell_its_method() -> None:
    assert SpeculativeConfig.read({"model": "a/draft"}) == SpeculativeConfig(None, "a/draft")


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
def test_a_method_without_a_model_has_none(method: str) -> None:
    with pytest.raises(ValueError, match=f"method {method} has no model"):
        SpeculativeConfig.read({"method": method, "model": "a/draft"})


def test_suffix_decoding_has_vllms_fields() -> None:
    fields = {"suffix_decoding_max_tree_depth": 12, "suffix_decoding_max_spec_factor": 2}
    neutral = {"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_min_token_prob": 0.1}
    config = SpeculativeConfig.read({"method": "suffix"} | fields | neutral)
    assert (config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor) == (12, 2.0)
    assert SpeculativeConfig.read(str(config)) == config


def test_neutral_values_of_vllms_other_fields_are_accepted() -> None:
    neutral = {"draft_tensor_parallel_size": 1, "max_model_len": None, "enforce_eager": False, "quantization": None}
    assert SpeculativeConfig.read(WHOLE | neutral) == SpeculativeConfig.read(WHOLE)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("draft_tensor_parallel_size", 2, "each device computes the whole draft"),
        ("max_model_len", 2048, "up to max_model_len of the model"),
        ("quantization", "fp8", "quantized checkpoints"),
        ("revision", "main", "the directory of that revision"),
        ("disable_by_batch_size", 4, "measured"),
        ("num_speculative_tokens_per_batch_size", [[1, 8, 3]], "measured"),
        ("parallel_drafting", True, "once for each draft"),
        ("suffix_decoding_max_cached_requests", 0, "one for each of max_num_seqs"),
        ("suffix_decoding_min_token_prob", 0.5, "without counting"),
    ],
)
def test_other_values_of_vllms_other_fields_are_refused(name: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"speculative_config {name} = .* is not supported .*{why}.*: leave it out"):
        SpeculativeConfig.read(WHOLE | {name: value})


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_max", 1), ("prompt_lookup_min", 7)])
def test_one_end_of_the_lookup_is_both(name: str, value: int) -> None:
    config = SpeculativeConfig.read({"method": "ngram", name: value})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (value, value)
    assert SpeculativeConfig.read(str(config)) == config
    assert SpeculativeConfig.read({"method": "ngram", "prompt_lookup_min": None}) == SpeculativeConfig("ngram")


def test_without_a_word_there_are_ngrams_and_speculation_can_be_off() -> None:
    assert EngineConfig().drafting == DEFAULT_SPECULATION
    assert EngineConfig(speculation=False).drafting is None
    chosen = EngineConfig(speculative_config='{"method": "ngram"}')
    assert chosen.drafting == SpeculativeConfig("ngram")
    with pytest.raises(ValueError, match="speculation is off: leave one of them out"):
        EngineConfig(speculation=False, speculative_config='{"method": "ngram"}')


def test_a_step_with_drafts_opens_one_page_for_a_row() -> None:
    """So that `StepPlan.without_drafts` may keep its pages."""
    assert MAX_DRAFTS + 1 <= min(PAGE_SIZES)
