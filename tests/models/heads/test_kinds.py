"""A directory that is to guess tells what it is, and each method takes its own kind and no other."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax.numpy as jnp
import pytest

from jaxvllm.core.speculative_config import Method, SpeculativeConfig
from jaxvllm.engine.drafting import Drafting
from jaxvllm.models.heads.kinds import MEDUSA_FILE, method_of
from tests.models.heads.test_files import MEDUSA, by_authors, eagle3_shapes, eagle_shapes, medusa_shapes
from tests.models.heads.test_mtp import config_of, head_shapes, model_shapes
from tests.models.heads.written import CONFIG, TARGET, E, V, write_head


@pytest.mark.parametrize(
    "name, config, method",
    [
        ("draft", {"speculators_model_type": "eagle3", "architectures": ["SomeDraftModel"]}, "eagle3"),
        ("draft", {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ("Qwen3-8B_eagle3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "eagle3"),
        ("draft", {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, "eagle"),
        ("EAGLE-LLaMA3-Instruct-8B", {"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ("draft", {"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
        ("medusa-vicuna", {"medusa_num_heads": 5, "medusa_num_layers": 1}, "medusa"),
        ("draft", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft_model"),
    ],
)
def test_a_draft_tells_its_method(name: str, config: dict[str, Any], method: str) -> None:
    assert method_of(name, config) == method


LLAMA = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MIMO = config_of("mimo")
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LLAMA,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
}
OUTER = {"embed_tokens.weight": [V, E], "lm_head.weight": [V, E]}
NAMES = by_authors(medusa_shapes())
# What may lie in a directory: the method that it is for, its name in errors, its config and its tensors.
KINDS: dict[str, tuple[Method, str, dict[str, Any], dict[str, list[int]]]] = {
    "model": ("draft_model", "a whole model", LLAMA, model_shapes(LLAMA | {"num_hidden_layers": 1})),
    "model with MTP": ("draft_model", "a whole model", MIMO, model_shapes(MIMO) | head_shapes("mimo", MIMO)),
    "eagle": ("eagle", "an EAGLE head", LLAMA, eagle_shapes(CONFIG)),
    "eagle, all its own": ("eagle", "an EAGLE head", LLAMA, eagle_shapes(CONFIG) | OUTER),
    "eagle3": ("eagle3", "an EAGLE-3 head", LLAMA, eagle3_shapes(CONFIG)),
    "eagle3 of speculators": ("eagle3", "an EAGLE-3 head", SPECULATORS, eagle3_shapes(CONFIG, "layers.0.")),
    "medusa": ("medusa", "Medusa heads", MEDUSA, medusa_shapes()),
    "medusa of its authors": ("medusa", "Medusa heads", MEDUSA, {NAMES[n]: s for n, s in medusa_shapes().items()}),
}
NEEDS = {method: name for method, name, _, _ in KINDS.values()}


def read(method: str | None, directory: Path) -> Drafting:
    """What the engine reads for the model of `written`."""
    target: Any = SimpleNamespace(spec=TARGET, dtype=jnp.float32, max_model_len=64, layout="separate")
    config: Any = {"method": method, "model": str(directory)}
    return Drafting.of(SpeculativeConfig(**config), target, directory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", NEEDS)
def test_a_method_takes_its_kind_and_no_other(method: Method, kind: str, tmp_path: Path) -> None:
    right, found, config, shapes = KINDS[kind]
    if "model" in kind:
        shapes = {name: shape for name, shape in shapes.items() if "layers.1." not in name}
        config = config | {"num_hidden_layers": 1}
    write_head(tmp_path, config, shapes)
    if method == right:
        assert read(method, tmp_path).params
        return
    told = f'method {method} needs {NEEDS[method]}, and {tmp_path} holds {found}: .* "method": "{right}"'
    with pytest.raises(ValueError, match=told):
        read(method, tmp_path)


def test_every_method_with_a_model_is_in_the_table() -> None:
    assert {*NEEDS, "ngram", "suffix", "mtp"} == {*get_args(Method)}


def test_a_head_whose_config_looks_like_a_model_is_told_apart(tmp_path: Path) -> None:
    write_head(tmp_path, LLAMA, eagle_shapes(CONFIG))
    with pytest.raises(ValueError, match='method draft_model needs .* holds an EAGLE head: .* "method": "eagle"'):
        read(None, tmp_path)


def test_other_heads_of_speculators_are_refused(tmp_path: Path) -> None:
    write_head(tmp_path, SPECULATORS | {"speculators_model_type": "peagle"}, eagle3_shapes(CONFIG, "layers.0."))
    with pytest.raises(ValueError, match=f"{tmp_path} has speculators_model_type 'peagle': .* only eagle3"):
        read("eagle3", tmp_path)


def test_a_converted_model_is_a_model(tmp_path: Path) -> None:
    write_head(tmp_path, LLAMA, {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "orbax").mkdir()
    with pytest.raises(ValueError, match="method medusa needs Medusa heads, and .* holds a whole model"):
        read("medusa", tmp_path)


def test_medusa_heads_by_the_name_of_their_authors(tmp_path: Path) -> None:
    write_head(tmp_path, {"medusa_num_heads": 3, "medusa_num_layers": 2}, KINDS["medusa of its authors"][3])
    (tmp_path / "model.safetensors").rename(tmp_path / MEDUSA_FILE)
    params = read("medusa", tmp_path).params
    assert params is not None and len(params["blocks"]) == len(params["lm_heads"]) == 3
    (tmp_path / MEDUSA_FILE).rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=f"{tmp_path} .* medusa_lm_head.pt, a pickle, which .* never opened") as error:
        read("medusa", tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_error_for_a_pickle_has_the_program_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "medusa_lm_head.pt").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="python -c") as error:
        read("medusa", tmp_path)
    saved: list[tuple[str, str]] = []
    torch = SimpleNamespace(load=lambda name, device, weights_only: f"{name} on {device}")
    saver = SimpleNamespace(torch=SimpleNamespace(save_file=lambda *given: saved.append(given)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "safetensors", saver)
    monkeypatch.setitem(sys.modules, "safetensors.torch", saver.torch)
    exec(str(error.value).split('python -c "')[1].removesuffix('"'), {})
    assert saved == [("medusa_lm_head.pt on cpu", MEDUSA_FILE)]
