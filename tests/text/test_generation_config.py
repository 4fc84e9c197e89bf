"""generation_config.json as the default of `generate`, and what an operator puts in its place."""

import json

import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.text.generation_config import GenerationDefaults, eos_token_ids, generation_config_file


def default_params(directory):
    return GenerationDefaults.read(directory).params


def write(directory, value):
    directory.mkdir(exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / "generation_config.json").write_text(text)
    return directory


def test_no_file_is_the_defaults(tmp_path):
    assert default_params(tmp_path) == SamplingParams()


def test_the_checkpoints_values_are_taken_and_others_ignored(tmp_path):
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7, "eos_token_id": 1, "do_sample": True}
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    assert default_params(write(tmp_path, config)) == expected


def test_a_repetition_penalty_is_taken(tmp_path):
    assert default_params(write(tmp_path, {"repetition_penalty": 1.1})) == SamplingParams(repetition_penalty=1.1)


@pytest.mark.parametrize("value", ["{", "[]", {"temperature": -1.0}])
def test_a_bad_file_is_named(tmp_path, value):
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        default_params(write(tmp_path, value))


def test_vllm_has_no_recommendations(tmp_path):
    write(tmp_path, {"temperature": 0.6, "max_new_tokens": 7})
    assert GenerationDefaults.read(tmp_path, "vllm") == GenerationDefaults(SamplingParams())


def test_another_directory_recommends_and_limits(tmp_path):
    model, other = write(tmp_path / "model", {"temperature": 0.6}), write(tmp_path / "other", {"max_new_tokens": 7})
    params = SamplingParams(max_tokens=7)
    assert GenerationDefaults.read(model, str(other)) == GenerationDefaults(params, max_tokens=7, most_tokens=7)


def test_only_an_operators_limit_is_one_for_all(tmp_path):
    write(tmp_path, {"temperature": 0.6, "max_new_tokens": 7})
    assert GenerationDefaults.read(tmp_path).most_tokens is None
    found = GenerationDefaults.read(tmp_path, override='{"max_new_tokens": 5, "top_k": 3}')
    assert found == GenerationDefaults(SamplingParams(temperature=0.6, top_k=3, max_tokens=5), 5, 5)


def test_a_directory_without_the_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="is no directory with a generation_config.json: give one, or auto"):
        GenerationDefaults.read(tmp_path, str(tmp_path / "nowhere"))


def test_eos_tokens_are_those_of_the_other_file(tmp_path):
    model, other = write(tmp_path / "model", {"eos_token_id": 5}), write(tmp_path / "other", {"eos_token_id": [6, 7]})
    assert eos_token_ids(model, 3) == (3, 5)
    assert eos_token_ids(model, 3, generation_config_file(model, str(other))) == (3, 6, 7)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("5", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ({"temperature": -1}, "override_generation_config: temperature must be"),
        ({"max_tokens": 5}, "has no 'max_tokens': it may have temperature, .*max_new_tokens"),
    ],
)
def test_a_wrong_override_is_an_error_at_once(value, told):
    with pytest.raises(ValueError, match=told):
        EngineConfig(override_generation_config=value)


def test_an_override_is_a_mapping_or_json():
    one = EngineConfig(override_generation_config={"temperature": 0.5})
    assert one == EngineConfig(override_generation_config=' {"temperature":0.5}')
