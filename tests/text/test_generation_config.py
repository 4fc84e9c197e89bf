"""generation_config.json as the default of `generate`."""

import json

import pytest

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.text.generation_config import default_params


def write(directory, value):
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
