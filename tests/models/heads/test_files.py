"""Published draft heads compute what a plain NumPy version of each paper computes, and broken ones are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.heads.files import read_eagle, read_eagle3, read_medusa
from jaxvllm.models.heads.head import DraftHead
from jaxvllm.models.params import Params
from sharding.axis import ALONE
from tests.models.dense import dense_attend
from tests.models.heads import reference
from tests.models.heads.written import CONFIG, OF_TARGET, TARGET, E, V, layer_shapes, of_target, write_head

pytestmark = pytest.mark.usefixtures("quick_fusions")

RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.integers(0, V, 9)
HIDDEN = RANDOM.standard_normal((9, E))
STATES = RANDOM.standard_normal((3, 9, E))


def computed(head: DraftHead, own: Params, tokens: np.ndarray, features: Any) -> tuple[np.ndarray, np.ndarray]:
    """The logits and features after pairs of token i + 1 and feature i, which we call position i + 1."""
    params = of_target(own)
    positions = jnp.arange(1, len(tokens) + 1, dtype=jnp.int32)
    ids, features = jnp.asarray(tokens, jnp.int32), jnp.asarray(features, jnp.float32)
    hidden, after, _ = head.apply(params, ids, positions, features, (), dense_attend, ALONE)  # type: ignore[attr-defined]
    return np.asarray(head.logits(params, hidden, TARGET, TARGET, ALONE)), np.asarray(after)


def assert_near(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


def eagle_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {"fc.weight": [E, 2 * E]}
    for number in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{number}.", E)
    del shapes["layers.0.input_layernorm.weight"]
    return shapes


def eagle3_shapes(config: Mapping[str, Any], first: str = "midlayer.") -> dict[str, list[int]]:
    shapes = {"fc.weight": [E, 3 * E], "norm.weight": [E]} | layer_shapes(config, first, 2 * E)
    shapes |= {f"{first}hidden_norm.weight": [E], "lm_head.weight": [config.get("draft_vocab_size", V), E]}
    for number in range(1, config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{number}.", E)
    return shapes


def assert_declared(head: Any, own: Any) -> None:
    """A head declares the arrays that were read for it, and no others."""
    assert jax.tree.map(lambda decl: decl.shape, head.declare()) == jax.tree.map(np.shape, own)


@pytest.mark.parametrize("extra", [{}, {"fc.bias": [E]}, {"embed_tokens.weight": [V, E], "lm_head.weight": [V, E]}])
@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}])
def test_eagle(config: dict[str, Any], extra: dict[str, list[int]], tmp_path: Path) -> None:
    config = CONFIG | config
    tensors = write_head(tmp_path, config, eagle_shapes(config) | extra)
    head, own = read_eagle(tmp_path, checkpoint.read_config(tmp_path), TARGET)
    assert_declared(head, own)
    embed = tensors.get("embed_tokens.weight", OF_TARGET["embed_tokens"])
    lm_head = tensors.get("lm_head.weight", OF_TARGET["lm_head"])
    assert_near(head.features(of_target(own), jnp.asarray(HIDDEN), jnp.zeros((0, 9, E))), HIDDEN)
    features, tokens = HIDDEN[:-1], TOKENS[1:]
    for _ in range(3):
        logits, after = computed(head, own, tokens, features)
        hidden = reference.eagle(tensors, config, embed[tokens], features)
        assert_near(logits, hidden @ lm_head.T)
        assert_near(after, hidden)
        # The next step has the token that the head guesses, and the feature that it thought.
        features, tokens = np.append(features, hidden[-1:], 0), np.append(tokens, logits[-1].argmax())


D2T = np.arange(12) * 2 + 1  # 12 tokens of the head: the model's 1, 4, 7, ...
OWN_WORDS = {"draft_vocab_size": 12}


@pytest.mark.parametrize(
    "options, extra, first",
    [
        ({}, {}, "midlayer."),
        ({"norm_before_residual": True}, {"embed_tokens.weight": [V, E]}, "layers.0."),
        ({"norm_before_fc": True}, {"input_norm.weight": [3 * E]}, "midlayer."),
        ({"eagle_config": {"norm_before_fc": True}}, {"input_norm.weight": [3 * E]}, "midlayer."),
        ({"fc_norm": True}, {f"fc_norm.{i}.weight": [E] for i in range(3)}, "midlayer."),
        ({"norm_output": True, "num_hidden_layers": 3}, {}, "midlayer."),
        ({"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}, {}, "layers.0."),
        ({}, {f"layers.0.self_attn.{x}_norm.weight": [8] for x in "qk"}, "layers.0."),
        (OWN_WORDS, {}, "midlayer."),
    ],
)
def test_eagle3(options: dict[str, Any], extra: dict[str, list[int]], first: str, tmp_path: Path) -> None:
    config = CONFIG | options
    integers = {"d2t": D2T, "t2d": np.ones(V, np.bool_)} if options is OWN_WORDS else {}
    tensors = write_head(tmp_path, config, eagle3_shapes(config, first) | extra, **integers)
    assert_eagle3(tmp_path, tensors, config | options.get("eagle_config", {}), (2, 4, 5))


@pytest.mark.parametrize("norm_before_residual", [None, False, True])
def test_eagle3_of_speculators(norm_before_residual: bool | None, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": CONFIG | {"model_type": "llama"},
        "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
        "target_hidden_size": None,
        **OWN_WORDS,
    }
    if norm_before_residual is not None:
        config["norm_before_residual"] = norm_before_residual
    tensors = write_head(tmp_path, config, eagle3_shapes(CONFIG | OWN_WORDS, "layers.0."), d2t=D2T)
    # That format, and no other, has the norm there unless it says no.
    plain = CONFIG | OWN_WORDS | {"norm_before_residual": norm_before_residual is not False}
    assert_eagle3(tmp_path, tensors, plain, (1, 3, 8))


def assert_eagle3(directory: Path, tensors: reference.Tensors, config: dict[str, Any], depths: tuple[int, ...]) -> None:
    """The head in `directory` computes what `reference` makes of `tensors`, over a prompt and three steps."""
    head, own = read_eagle3(directory, checkpoint.read_config(directory), TARGET)
    assert_declared(head, own)
    assert head.depths == depths
    features = reference.eagle3_features(tensors, config, STATES)
    got = head.features(of_target(own), jnp.asarray(HIDDEN), jnp.asarray(STATES, jnp.float32))
    assert_near(got, features)
    embed = tensors.get("embed_tokens.weight", OF_TARGET["embed_tokens"])
    features, tokens = features[:-1], TOKENS[1:]
    for _ in range(3):
        logits, after = computed(head, own, tokens, features)
        hidden, expected = reference.eagle3(tensors, config, embed[tokens], features)
        ids = np.arange(12) + D2T if "draft_vocab_size" in config else np.arange(V)
        assert_near(logits, reference.spread_over(hidden @ tensors["lm_head.weight"].T, ids, V))
        assert_near(after, expected)
        features, tokens = np.append(features, expected[-1:], 0), np.append(tokens, logits[-1].argmax())


MEDUSA = {"num_heads": 3, "num_hidden_layers": 2, "hidden_size": E, "vocab_size": V}
TOKEN_MAP = np.array([3, 30, 1, 7, 39])


def medusa_shapes(size: int = V, bias: bool = False) -> dict[str, list[int]]:
    shapes = {f"blocks.{i}.layers.{j}.weight": [E, E] for i in range(3) for j in range(2)}
    shapes |= {f"blocks.{i}.layers.{j}.bias": [E] for i in range(3) for j in range(2) if bias}
    return shapes | {f"lm_heads.{i}.weight": [size, E] for i in range(3)}


def by_authors(shapes: Mapping[str, list[int]]) -> dict[str, str]:
    """Their names by those of vLLM."""
    names = {}
    for name in shapes:
        kind, head, *rest = name.split(".")
        names[name] = f"{head}.2.weight" if kind == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}"
    return names


@pytest.mark.parametrize("names", ["vllm", "authors", "authors, in a model"])
@pytest.mark.parametrize("size", [V, 5, "rows for all"])
@pytest.mark.parametrize("lm_heads", ["own", "one", "the model's"])
def test_medusa(names: str, size: int | str, lm_heads: str, tmp_path: Path) -> None:
    config: dict[str, Any] = MEDUSA | {"original_lm_head": lm_heads != "own"}
    integers = {}
    if size != V:
        config, integers = config | {"truncated_vocab_size": 5}, {"token_map": TOKEN_MAP}
    shapes = medusa_shapes(5 if size == 5 else V, bias=names != "vllm")
    if lm_heads != "own":
        shapes = {name: shape for name, shape in shapes.items() if "lm_heads" not in name}
    if lm_heads == "one":
        shapes["lm_heads.0.weight"] = [5 if size == 5 else V, E]
    if names != "vllm":
        prefix = "medusa_heads." if "model" in names else ""
        renamed = by_authors(shapes) if lm_heads == "own" else {}
        renamed |= {name: new for name, new in by_authors(shapes).items() if name.startswith("blocks")}
        written = write_head(
            tmp_path, config, {prefix + renamed.get(name, name): shapes[name] for name in shapes}, **integers
        )
        tensors = {name: written[prefix + renamed.get(name, name)] for name in shapes}
    else:
        tensors = write_head(tmp_path, config, shapes, **integers)
    if lm_heads == "the model's" and size != V:
        with pytest.raises(ValueError, match=f"{tmp_path}.*whole vocabulary"):
            read_medusa(tmp_path, checkpoint.read_config(tmp_path), TARGET)
        return
    heads, own = read_medusa(tmp_path, checkpoint.read_config(tmp_path), TARGET)
    assert_declared(heads, own)
    got = heads.logits(of_target(own), jnp.asarray(HIDDEN, jnp.float32), 3, TARGET, TARGET, ALONE)
    for number in range(3):
        x = HIDDEN
        for block in range(2):
            x = x + reference.silu(reference.linear(tensors, f"blocks.{number}.layers.{block}", x))
        name = {"own": f"lm_heads.{number}.weight", "one": "lm_heads.0.weight"}.get(lm_heads, "")
        logits = x @ tensors.get(name, OF_TARGET["lm_head"]).T
        if size != V:
            logits = reference.spread_over(logits[:, TOKEN_MAP] if size != 5 else logits, TOKEN_MAP, V)
        assert_near(got[number], logits)


Shapes = dict[str, list[int]]
READERS: dict[str, tuple[Callable[..., Any], dict[str, Any], Shapes, dict[str, np.ndarray]]] = {
    "eagle": (read_eagle, CONFIG, eagle_shapes(CONFIG), {}),
    "eagle3": (read_eagle3, CONFIG | OWN_WORDS, eagle3_shapes(CONFIG | OWN_WORDS), {"d2t": D2T}),
    "medusa": (read_medusa, MEDUSA | {"truncated_vocab_size": 5}, medusa_shapes(5), {"token_map": TOKEN_MAP}),
}


@pytest.mark.parametrize(
    "kind, change, rule",
    [
        ("eagle", {"fc.weight": None}, "lacks the tensor fc.weight"),
        ("eagle", {"layers.0.mlp.up_proj.weight": None}, "lacks the tensor layers.0.mlp.up_proj.weight"),
        ("eagle", {"fc.weight": [E, E]}, "fc.weight has shape"),
        ("eagle", {"layers.0.input_layernorm.weight": [E]}, "unexpected tensor layers.0.input_layernorm.weight"),
        ("eagle", {"hidden_size": 24}, "hidden states of 24, and the model has 16"),
        ("eagle", {"num_attention_heads": None}, "config lacks num_attention_heads"),
        ("eagle3", {"lm_head.weight": None}, "lacks the tensor lm_head.weight"),
        ("eagle3", {"midlayer.self_attn.q_proj.weight": [32, E]}, "q_proj.weight has shape"),
        ("eagle3", {"mask_hidden": [1, 3 * E]}, "unexpected tensor mask_hidden"),
        ("eagle3", {"d2t": D2T + 50}, "maps its tokens to 51..84, and the model has 40"),
        ("eagle3", {"d2t": D2T - 9}, "maps its tokens to -8"),
        ("eagle3", {"d2t": D2T[:5]}, "must have the integers d2t of shape"),
        ("eagle3", {"target_hidden_size": 24}, "hidden states of 24, and the model has 16"),
        ("eagle3", {"hidden_size": 24}, "hidden states of 24, and the model has 16"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "must rise from 0 to at most 8"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "must rise from 0 to at most 8"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("eagle3", {"norm_output": "yes"}, "config norm_output must be true or false"),
        ("medusa", {"blocks.2.layers.1.weight": None}, "lacks the tensor blocks.2.layers.1.weight"),
        ("medusa", {"lm_heads.1.weight": [4, E]}, "lm_heads.1.weight has shape"),
        ("medusa", {"num_heads": 2}, "unexpected tensor blocks.2.layers.0.weight"),
        ("medusa", {"hidden_size": 24}, "hidden states of 24, and the model has 16"),
        ("medusa", {"token_map": TOKEN_MAP + 5}, "maps its tokens to 6..44, and the model has 40"),
        ("medusa", {"truncated_vocab_size": None}, "config lacks truncated_vocab_size"),
    ],
)
def test_a_broken_head_is_refused(kind: str, change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    read, config, shapes, integers = READERS[kind]
    [(name, value)] = change.items()
    parts: list[dict[str, Any]] = [dict(config), dict(shapes), dict(integers)]
    is_shape = isinstance(value, list) and ("weight" in name or "mask" in name)
    place = 1 if name in shapes or is_shape else 2 if name in integers else 0
    parts[place][name] = value
    config, shapes, integers = ({key: one for key, one in part.items() if one is not None} for part in parts)
    write_head(tmp_path, config, shapes, **integers)
    with pytest.raises(ValueError, match=rule) as error:
        read(tmp_path, checkpoint.read_config(tmp_path), TARGET)
    assert str(tmp_path) in str(error.value)


def test_medusa_heads_without_lm_heads_are_refused(tmp_path: Path) -> None:
    blocks = {name: shape for name, shape in medusa_shapes().items() if name.startswith("blocks")}
    write_head(tmp_path, MEDUSA, blocks)
    with pytest.raises(
        ValueError, match=f'{tmp_path} has no LM heads, such as lm_heads.0.weight: .*"original_lm_head"'
    ):
        read_medusa(tmp_path, MEDUSA, TARGET)
    read_medusa(tmp_path, MEDUSA | {"original_lm_head": True}, TARGET)
