"""MTP heads compute what a plain NumPy version computes, and the model beside them is what it is without them."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.heads.mtp_files import read_mtp
from sharding.axis import ALONE
from tests.models.dense import dense_attend
from tests.models.heads import reference
from tests.models.heads.written import CONFIG, OF_TARGET, E, V, layer_shapes, of_target, write_head

pytestmark = pytest.mark.usefixtures("quick_fusions")

RANDOM = np.random.default_rng(4)
TOKENS, HIDDEN = RANDOM.integers(0, V, 9), RANDOM.standard_normal((9, E))
STATES = RANDOM.standard_normal((1, 9, E))
LAYERS = 2
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
KINDS: dict[str, tuple[str, tuple[str, str, str, str], dict[str, Any]]] = {
    "deepseek": ("model.layers.2.", DEEPSEEK, {"architectures": ["LlamaForCausalLM"]}),
    "deepseek, in a Qwen 3": ("model.layers.2.", DEEPSEEK, {"architectures": ["Qwen3ForCausalLM"]}),
    "mimo": ("model.mtp_layers.0.", MIMO, {"architectures": ["MiMoForCausalLM"], "attention_bias": True}),
}


def config_of(kind: str, count: int = 1) -> dict[str, Any]:
    return CONFIG | KINDS[kind][2] | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": count}


def decoder_shapes(config: dict[str, Any], prefix: str) -> dict[str, list[int]]:
    """The tensors of an ordinary layer of the family."""
    shapes = layer_shapes(config, prefix, E)
    if "Qwen3" in config["architectures"][0]:
        shapes |= {f"{prefix}self_attn.{x}_norm.weight": [8] for x in "qk"}
    shapes.pop(f"{prefix}self_attn.o_proj.bias", None)  # which a Qwen 2 lacks
    return shapes


def model_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [V, E], "lm_head.weight": [V, E], "model.norm.weight": [E]}
    for number in range(LAYERS):
        shapes |= decoder_shapes(config, f"model.layers.{number}.")
    return shapes


def place_of(first: str, number: int) -> str:
    """Where head `number` is if the first is at `first`."""
    return first.replace("2.", f"{2 + number}.").replace("0.", f"{number}.")


def head_shapes(kind: str, config: dict[str, Any], count: int = 1) -> dict[str, list[int]]:
    first, names, _ = KINDS[kind]
    shapes: dict[str, list[int]] = {}
    for number in range(count):
        start = place_of(first, number)
        shapes |= decoder_shapes(config, start)
        shapes |= {f"{start}{name}.weight": [E, 2 * E] if "proj" in name else [E] for name in names}
        if kind != "mimo":
            shapes |= {f"{start}{name}.weight": [V, E] for name in ("embed_tokens", "shared_head.head")}
    return shapes


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head(kind: str, number: int, tmp_path: Path) -> None:
    config, (start, names, _) = config_of(kind, 2), KINDS[kind]
    tensors = write_head(tmp_path, config, model_shapes(config) | head_shapes(kind, config, 2))
    target = model_spec(config)
    heads, own = read_mtp(tmp_path, checkpoint.read_config(tmp_path), target, 3)
    assert len(heads) == len(own["heads"]) == 2
    head = heads[number]
    assert jax.tree.map(lambda decl: decl.shape, head.declare()) == jax.tree.map(np.shape, own["heads"][number])
    # MiMo's was trained on what is in front of the model's final norm, the other on what is after it.
    assert head.depths == ((LAYERS,) if kind == "mimo" else ())
    features = head.features(of_target(own), jnp.asarray(HIDDEN), jnp.asarray(STATES))
    np.testing.assert_array_equal(features, np.float32(STATES[0] if kind == "mimo" else HIDDEN))
    params, features, tokens = of_target(own), HIDDEN[:-1], TOKENS[1:]
    for _ in range(3):
        # The first token beside a feature, which has no embedding, is one further for each head.
        positions = jnp.arange(1 + number, len(tokens) + 1 + number, dtype=jnp.int32)
        given = jnp.asarray(tokens, jnp.int32), positions, jnp.asarray(features, jnp.float32)
        hidden, after, _ = head.apply(params, *given, (), dense_attend, ALONE)
        of_head = place_of(start, number)
        expected = reference.mtp(tensors, config, names, of_head, OF_TARGET["embed_tokens"][tokens], features)
        logits = head.logits(params, hidden, target, target, ALONE)
        np.testing.assert_allclose(after, expected, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(logits, expected @ OF_TARGET["lm_head"].T, rtol=2e-4, atol=2e-4)
        features, tokens = np.append(features, expected[-1:], 0), np.append(tokens, logits[-1].argmax())


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_beside_a_head_is_the_same(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, 2)
    write_head(tmp_path / "with", config, model_shapes(config) | head_shapes(kind, config, 2))
    write_head(tmp_path / "without", config, model_shapes(config))
    spec = model_spec(config)
    trees = [
        checkpoint.load(tmp_path / name, spec, dtype=jnp.float32, layout="separate") for name in ("with", "without")
    ]
    chex.assert_trees_all_equal(*trees)
    # No more heads are read than there are drafts.
    [head], own = read_mtp(tmp_path / "with", config, spec, 1)
    assert head.spec.num_layers == len(own["heads"]) == 1


@pytest.mark.parametrize(
    "kind, options, change, rule",
    [
        ("mimo", {"num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers"),
        ("mimo", {}, {"input_proj.weight": None}, "lacks the tensor model.mtp_layers.0.input_proj.weight"),
        ("mimo", {}, {"input_proj.weight": [E, E]}, "input_proj.weight has shape"),
        ("mimo", {}, {"self_attn.q_proj.bias": None}, "lacks the tensor model.mtp_layers.0.self_attn.q_proj.bias"),
        ("mimo", {}, {"extra.weight": [E]}, "unexpected tensor model.mtp_layers.0.extra.weight"),
        ("deepseek", {}, {"enorm.weight": None}, "lacks the tensor model.layers.2.enorm.weight"),
        ("deepseek", {"architectures": ["Olmo2ForCausalLM"]}, {}, "not those of Olmo2ForCausalLM"),
    ],
)
def test_a_broken_head_is_refused(
    kind: str, options: dict[str, Any], change: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    config = config_of(kind) | options
    shapes: dict[str, Any] = head_shapes(kind, config) | {KINDS[kind][0] + name: new for name, new in change.items()}
    write_head(tmp_path, config, {name: shape for name, shape in shapes.items() if shape is not None})
    with pytest.raises(ValueError, match=rule) as error:
        read_mtp(tmp_path, checkpoint.read_config(tmp_path), model_spec(config), 3)
    assert str(tmp_path) in str(error.value)


def test_a_converted_model_has_no_head(tmp_path: Path) -> None:
    config = config_of("mimo")
    write_head(tmp_path, config, head_shapes("mimo", config))
    (tmp_path / "orbax").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}: a converted model has no MTP layer.*: give the original"):
        read_mtp(tmp_path, config, model_spec(config), 3)


def test_a_part_of_a_head_in_a_layer_of_the_model_is_refused(tmp_path: Path) -> None:
    config = config_of("deepseek")
    write_head(tmp_path, config, model_shapes(config) | {"model.layers.1.eh_proj.weight": [E, 2 * E]})
    with pytest.raises(ValueError, match="unexpected tensor model.layers.1.eh_proj.weight"):
        checkpoint.load(tmp_path, model_spec(config), dtype=jnp.float32, layout="separate")
