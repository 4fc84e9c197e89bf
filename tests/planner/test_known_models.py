"""Well-known models: their parameters are as many as published, and names lead to them."""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families import model_spec
from jaxvllm.models.params import num_parameters
from jaxvllm.models.spread import Spread
from jaxvllm.planner.known_models import find_config, known_models
from tests.gguf_files import sized, write_gguf
from tests.models.fixture import Fixture

# Billions, as the models' pages give them (Qwen: as its model cards do). Qwen 3's small ones are without the copy of
# the tied embedding that their files have; Gemma 3 without the vision tower, as in its report (arXiv 2503.19786).
PUBLISHED = {
    "meta-llama/Llama-3.1-8B": "8.03",
    "meta-llama/Llama-3.1-70B": "70.6",
    "meta-llama/Llama-3.2-1B": "1.24",
    "meta-llama/Llama-3.2-3B": "3.21",
    "meta-llama/Llama-3.3-70B": "70.6",
    "Qwen/Qwen2.5-0.5B": "0.49",
    "Qwen/Qwen2.5-1.5B": "1.54",
    "Qwen/Qwen2.5-3B": "3.09",
    "Qwen/Qwen2.5-7B": "7.62",
    "Qwen/Qwen2.5-14B": "14.8",
    "Qwen/Qwen2.5-32B": "32.8",
    "Qwen/Qwen2.5-72B": "72.7",
    "Qwen/Qwen3-0.6B": "0.6",
    "Qwen/Qwen3-1.7B": "1.7",
    "Qwen/Qwen3-4B": "4.0",
    "Qwen/Qwen3-8B": "8.2",
    "Qwen/Qwen3-14B": "14.8",
    "Qwen/Qwen3-32B": "32.8",
    "google/gemma-2-2b": "2.61",
    "google/gemma-2-9b": "9.24",
    "google/gemma-2-27b": "27.2",
    "google/gemma-3-1b": "1.00",
    "google/gemma-3-4b": "3.88",
    "google/gemma-3-12b": "11.8",
    "google/gemma-3-27b": "27.0",
    "mistralai/Mistral-7B-v0.3": "7.25",
    "mistralai/Mistral-Nemo-Base-2407": "12.2",
    "mistralai/Mistral-Small-24B-Base-2501": "23.6",
    "microsoft/Phi-3-mini-4k": "3.82",
    "microsoft/phi-4": "14.7",
    "HuggingFaceTB/SmolLM2-135M": "0.135",
    "HuggingFaceTB/SmolLM2-360M": "0.362",
    "HuggingFaceTB/SmolLM2-1.7B": "1.71",
    "HuggingFaceTB/SmolLM3-3B": "3.08",
    "allenai/OLMo-2-0425-1B": "1.48",
    "allenai/OLMo-2-1124-7B": "7.30",
    "allenai/OLMo-2-1124-13B": "13.7",
    "allenai/OLMo-2-0325-32B": "32.2",
    "ibm-granite/granite-3.3-2b": "2.53",
    "ibm-granite/granite-3.3-8b": "8.17",
    "deepseek-ai/DeepSeek-V2-Lite": "15.7",
    "deepseek-ai/DeepSeek-V3": "671",
    "openai/gpt-oss-20b": "20.9",
    "openai/gpt-oss-120b": "117",
    "Qwen/Qwen3-30B-A3B": "30.5",
    "Qwen/Qwen3-235B-A22B": "235",
    "Qwen/Qwen3.5-35B-A3B": "35",
    "mistralai/Mixtral-8x7B-v0.1": "46.7",
}


def test_every_model_has_a_published_count():
    assert list(PUBLISHED) == list(known_models())


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters_are_as_many_as_published(name, published):
    spec = model_spec(known_models()[name])
    count = Decimal(num_parameters(spec)) / 10**9
    assert count.quantize(Decimal(published)) == Decimal(published)
    assert Spread(spec, 1).whole == spec


@pytest.mark.parametrize(
    ("name", "stages", "counts"),
    [
        ("deepseek-ai/DeepSeek-V3", 2, [{False: 3, True: 28}, {True: 30}]),  # whether a layer has experts
        ("deepseek-ai/DeepSeek-V2-Lite", 3, [{False: 1, True: 8}, {True: 9}, {True: 9}]),
        ("Qwen/Qwen3.5-35B-A3B", 4, [{True: 10}] * 4),
    ],
)
def test_models_whose_layers_differ_are_divided_into_stages(name, stages, counts):
    spread = Spread(model_spec(known_models()[name]), 1, stages)
    experts = [[isinstance(layer.ffn, ExpertsFfn) for layer in part.layers] for part in spread.parts]
    assert list(map(Counter, experts)) == counts


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("LLAMA-3.3-70b-instruct", "meta-llama/Llama-3.3-70B"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("mistral-nemo", "mistralai/Mistral-Nemo-Base-2407"),
        ("olmo-2-32b", "allenai/OLMo-2-0325-32B"),
        ("phi-4", "microsoft/phi-4"),
    ],
)
def test_names_match_in_any_case_and_tuned(asked, found):
    assert find_config(asked) == (found, known_models()[found])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("Llama-3.1-9B", "did you mean meta-llama/Llama-3.1-8B"),
        ("Qwen3-4B-Instruct-2507", "did you mean Qwen/Qwen3-4B"),  # its RoPE is another one
        ("mycorp/phi-4", "did you mean microsoft/phi-4"),
        ("~nouser/x", "model '~nouser/x' begins with a home that is not here: give the whole path"),
        ("/no/such/place", "no directory, no config.json and no known name: known are meta-llama/Llama-3.1-8B, "),
    ],
)
def test_what_is_not_known_says_what_is(asked, said):
    with pytest.raises(ValueError) as error:
        find_config(asked)
    assert said in str(error.value)


def test_directories_and_files(tmp_path):
    config = known_models()["microsoft/phi-4"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert find_config(str(tmp_path)) == (str(tmp_path), config)
    assert find_config(str(file)) == (str(file), config)
    other = tmp_path / "phi.json"
    file.rename(other)
    assert find_config(str(other)) == (str(other), config)
    other.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        find_config(str(other))
    with pytest.raises(ValueError, match="has no config.json"):
        find_config(str(tmp_path))
    assert find_config("demo")[0] == "demo"


def test_a_gguf_file_says_its_sizes(tmp_path: Path) -> None:
    fixture = Fixture.load("llama")
    write_gguf(tmp_path / "model.gguf", sized(fixture), fixture.weights())
    _, config = find_config(str(tmp_path / "model.gguf"))
    assert find_config(str(tmp_path))[1] == config, "a directory of one file"
    (tmp_path / "model.gguf").rename(tmp_path / "llama-Q8_0.gguf")
    write_gguf(tmp_path / "llama-F16.gguf", sized(fixture), fixture.weights())
    assert find_config(f"{tmp_path}:q8_0")[1] == config
    with pytest.raises(ValueError, match="give one of these, or"):
        find_config(str(tmp_path))
    assert num_parameters(model_spec(config)) == num_parameters(model_spec(fixture.config))
