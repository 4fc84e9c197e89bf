"""A kind of FFN that the product does not know, in a family whose layers differ: declared, loaded, spread and run.

What is here is all that such a family takes: the kind, and a family that names it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from jaxvllm.models import checkpoint, families, orbax_tree
from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import model_spec
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.forms import PLAIN_FORMS, Forms, Matrix
from jaxvllm.models.forms.turned import Turned
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_loops import Loop, layer_loops
from jaxvllm.models.ops import project
from jaxvllm.models.params import Layout, abstract_params, num_parameters
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.weight_names import Source, attention_sources, gated_ffn_sources, norm_sources, whole
from jaxvllm.planner.share import Share
from sharding.axis import ModelAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import MODEL
from tests.models.dense import dense_logits
from tests.models.seeded_weights import seeded_weights

pytestmark = pytest.mark.usefixtures("quick_fusions")


@dataclass(frozen=True)
class SoftlyRoutedFfn:
    """Every expert of every token, weighted by a router: a mixture of experts without a choice."""

    hidden_size: int
    num_experts: int
    size: int  # of an expert

    def declare(self) -> dict[str, ParamDecl]:
        E, X, F = self.hidden_size, self.num_experts, self.size
        return {
            "router": ParamDecl((X, E), (None, "embed"), storage="matrix"),
            # Experts within, so that every device has a share of each.
            "experts_up": ParamDecl((F, X, E), ("ffn", None, "embed"), storage="matrix"),
            "experts_down": ParamDecl((E, F * X), ("embed", "ffn"), storage="matrix"),
        }

    def problem(self, size: int) -> str | None:
        return f"experts of size {self.size} do not divide over {size} devices" if self.size % size else None

    def spread(self, size: int) -> "SoftlyRoutedFfn":
        return self

    def shard(self, size: int) -> "SoftlyRoutedFfn":
        return replace(self, size=self.size // size)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        chosen = jax.nn.softmax(project(x, weights["router"]))  # [T, X]
        h = jax.nn.relu(project(x, weights["experts_up"])) * chosen[:, None]  # [T, F, X]
        return given.axis.sum(project(h.reshape(len(x), -1), weights["experts_down"]))


def toy_spec(config: HfConfig) -> ModelSpec:
    spec, first = llama_spec(config), config.integer("first_k_dense_replace")
    routed = SoftlyRoutedFfn(spec.hidden_size, config.integer("num_experts"), config.integer("moe_intermediate_size"))
    # The last layer attends with fewer and larger heads.
    windows = (3 if layer >= first and (layer - first) % 3 < 2 else None for layer in range(spec.num_layers))
    layers = list(spec.layers[0].in_windows(windows))
    layers[first:] = [replace(layer, ffn=routed) for layer in layers[first:]]
    attention = layers[-1].attention
    assert isinstance(attention, GroupedQueryAttention)
    layers[-1] = replace(layers[-1], attention=replace(attention, num_heads=2, num_kv_heads=2))
    return replace(spec, layers=tuple(layers))


def toy_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    sources = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    ffn = spec.layers[layer].ffn
    if not isinstance(ffn, SoftlyRoutedFfn):
        return sources | gated_ffn_sources(spec, layer, prefix)
    E, X, F = ffn.hidden_size, ffn.num_experts, ffn.size
    experts = [f"{prefix}mlp.experts.{i}.up_proj.weight" for i in range(X)]
    return sources | {
        "router": whole(f"{prefix}mlp.gate.weight", (X, E)),
        "experts_up": tuple(Source(name, (F, E), (0, i, 0), (F, 1, E)) for i, name in enumerate(experts)),
        "experts_down": whole(f"{prefix}mlp.experts.down_proj.weight", (E, F * X)),
    }


FAMILY = Family("ToyForCausalLM", toy_spec, layer_sources=toy_sources, understood=("num_experts",))
V, E, D, LAYERS, DENSE, X, F = 40, 32, 8, 9, 2, 3, 8
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": D,
    "max_position_embeddings": 64,
    "first_k_dense_replace": DENSE,
    "num_experts": X,
    "moe_intermediate_size": F,
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8]


def stored_shapes() -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [V, E], "model.norm.weight": [E], "lm_head.weight": [V, E]}
    for i in range(LAYERS):
        H, K = (4, 2) if i < LAYERS - 1 else (2, 2)
        layer = {"self_attn.q_proj": [H * D, E], "self_attn.k_proj": [K * D, E], "self_attn.v_proj": [K * D, E]}
        layer |= {"self_attn.o_proj": [E, H * D], "input_layernorm": [E], "post_attention_layernorm": [E]}
        if i < DENSE:
            layer |= {"mlp.gate_proj": [24, E], "mlp.up_proj": [24, E], "mlp.down_proj": [E, 24]}
        else:
            layer |= {"mlp.gate": [X, E], "mlp.experts.down_proj": [E, F * X]}
            layer |= {f"mlp.experts.{x}.up_proj": [F, E] for x in range(X)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


STORED = seeded_weights(stored_shapes(), 7, 0.0)


def naive_logits(tokens: list[int]) -> np.ndarray:
    """f64[T, V], one layer after the other and one token at a time, from the tensors of the checkpoint."""
    w = {name: value.astype(np.float64) for name, value in STORED.items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def rotated(x: np.ndarray) -> np.ndarray:  # [T, heads, D]
        angles = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(0, D, 2) / D)
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max())
        return e / e.sum()

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        at = {name.removeprefix(f"model.layers.{i}.")[:-7]: value for name, value in w.items() if f".{i}." in name}
        h = norm(x, w[f"model.layers.{i}.input_layernorm.weight"])
        q, k, v = ((h @ at[f"self_attn.{n}_proj"].T).reshape(len(x), -1, D) for n in "qkv")
        q, k = rotated(q), rotated(k)
        window = 3 if i >= DENSE and (i - DENSE) % 3 < 2 else len(x)
        out = np.zeros_like(q)
        for t in range(len(x)):
            seen = slice(max(t + 1 - window, 0), t + 1)
            for head in range(q.shape[1]):
                own = head * k.shape[1] // q.shape[1]
                out[t, head] = softmax(k[seen, own] @ q[t, head] * D**-0.5) @ v[seen, own]
        x = x + out.reshape(len(x), -1) @ at["self_attn.o_proj"].T
        h = norm(x, w[f"model.layers.{i}.post_attention_layernorm.weight"])
        if i < DENSE:
            gate = h @ at["mlp.gate_proj"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ at["mlp.up_proj"].T)) @ at["mlp.down_proj"].T
        else:
            down = w[f"model.layers.{i}.mlp.experts.down_proj.weight"].reshape(E, F, X)
            for t in range(len(x)):
                chosen = softmax(at["mlp.gate"] @ h[t])
                for e in range(X):
                    up = w[f"model.layers.{i}.mlp.experts.{e}.up_proj.weight"]
                    x[t] += chosen[e] * down[:, :, e] @ np.maximum(up @ h[t], 0)
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(families.MODULES, FAMILY.architecture, __name__)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(STORED, tmp_path / "model.safetensors")
    return tmp_path


TURNED = Forms(layers=Turned(), outside=Turned(), head=Turned())


def load(model: Path, layout: Layout, size: int = 1, forms: Forms = PLAIN_FORMS) -> tuple[Any, ModelSpec]:
    spec, mesh = model_spec(checkpoint.read_config(model)), make_mesh(MeshShape(1, size), jax.devices())
    return checkpoint.load(model, spec, dtype=jnp.float32, layout=layout, mesh=mesh, forms=forms), spec


def check(logits: jax.Array) -> None:
    chex.assert_trees_all_close(np.asarray(logits)[:, :V], naive_logits(TOKENS).astype(np.float32), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_what_the_layers_compute(model: Path, layout: Layout) -> None:
    params, spec = load(model, layout)
    assert layer_loops(spec.layers) == (Loop(0, 1, (2,)), Loop(2, 2, (2, 1)), Loop(8, 1, (1,)))
    check(jax.jit(lambda params: dense_logits(params, spec, TOKENS))(params))


def test_turned_round(model: Path) -> None:
    params, spec = load(model, "separate", forms=TURNED)
    assert {name for name, array in params["layers"][5].items() if isinstance(array, Matrix)} == {
        *("qkv", "o", "router", "experts_up", "experts_down")
    }
    check(jax.jit(lambda params: dense_logits(params, spec, TOKENS))(params))


@pytest.mark.parametrize(("size", "layout"), [(2, "stacked"), (4, "separate"), (8, "stacked")])
def test_on_a_mesh(model: Path, size: int, layout: Layout) -> None:
    params, spec = load(model, layout, size)
    run = jax.shard_map(
        lambda params: dense_logits(params, Spread(spec, size).shard, TOKENS, ModelAxis(size)),
        mesh=make_mesh(MeshShape(1, size), jax.devices()),
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, params),),
        out_specs=PartitionSpec(None, MODEL),
        check_vma=False,
    )
    check(jax.jit(run)(params))
    assert Spread(spec, size).shard.layers[-1].ffn == SoftlyRoutedFfn(E, X, F // size)


def test_devices_that_experts_do_not_divide_over(model: Path) -> None:
    with pytest.raises(ValueError, match=r"experts of size 8 do not divide over 3 devices: use a mesh of 1x1, 1x2"):
        load(model, "stacked", 3)


def test_converted(model: Path) -> None:
    checkpoint.convert(model, model / "out", dtype="auto", mesh=make_mesh(MeshShape(1, 2), jax.devices()))
    for layout, size in (("separate", 1), ("stacked", 4)):
        chex.assert_trees_all_equal(load(model / "out", layout, size)[0], load(model, layout, size)[0])


def test_stacks_hold_the_layers_that_have_such_an_array(model: Path) -> None:
    params, spec = load(model, "stacked")
    layers = params["layers"]
    assert {name: len(stack) for name, stack in layers.items()} == {
        "qkv": LAYERS - 1,
        "qkv.1": 1,
        "o": LAYERS - 1,
        "o.1": 1,
        "attention_norm": LAYERS,
        "ffn_norm": LAYERS,
        "gate_up": DENSE,
        "down": DENSE,
        **dict.fromkeys(("router", "experts_up", "experts_down"), LAYERS - DENSE),
    }
    assert num_parameters(spec) == sum(array.size for array in STORED.values())


@dataclass(frozen=True)
class Int8Ffn(GatedFfn):
    """Matrices of a byte an element, with a scale a row beside each."""

    def declare(self) -> dict[str, ParamDecl]:
        decls = {name: replace(decl, dtype="int8", init="ones") for name, decl in super().declare().items()}
        scales = {
            f"{name}_scale": ParamDecl(decl.shape[:-1], decl.axes[:-1], "ones", dtype="float32")
            for name, decl in decls.items()
        }
        return decls | scales


def int8_spec() -> ModelSpec:
    spec = llama_spec(HfConfig(CONFIG | {"num_experts": 0}))
    return replace(spec, layers=tuple(replace(layer, ffn=Int8Ffn(E, 24)) for layer in spec.layers))


def test_an_orbax_tree_keeps_dtypes(tmp_path: Path) -> None:
    spec = int8_spec()
    params = checkpoint.load(Path(), spec, dtype=jnp.bfloat16, layout="separate", load_format="dummy")
    orbax_tree.save(tmp_path / "orbax", params)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.bfloat16, layout="separate"), params)
    params["layers"][3]["down"] = params["layers"][3]["down"].astype(jnp.bfloat16)
    orbax_tree.save(tmp_path / "other" / "orbax", params)
    with pytest.raises(ValueError, match=r"array layers\.3\.down has dtype bfloat16: supported are int8"):
        checkpoint.load(tmp_path / "other", spec, dtype=jnp.bfloat16, layout="separate")


def test_arrays_have_the_dtype_that_they_are_declared_with() -> None:
    spec = int8_spec()
    layouts: list[Layout] = ["separate", "stacked"]
    for layout in layouts:
        mesh = make_mesh(MeshShape(1, 2), jax.devices())
        abstract = abstract_params(spec, jnp.bfloat16, layout, mesh)
        real = checkpoint.load(Path(), spec, dtype=jnp.bfloat16, layout=layout, load_format="dummy", mesh=mesh)
        chex.assert_trees_all_equal_shapes_and_dtypes(abstract, real)
    share = Share(Spread(spec), jnp.dtype(jnp.bfloat16))
    by_dtype = {"int8": 1, "float32": 4, "bfloat16": 2}
    stacks = jax.tree.leaves(abstract_params(spec, jnp.bfloat16, "stacked", make_mesh(MeshShape(1, 1), jax.devices())))
    assert share.weight_bytes == sum(stack.size * by_dtype[str(stack.dtype)] for stack in stacks)
    assert share.flops(1, 0) == 2 * LAYERS * (E * (4 + 2 * 2) * D + E * 4 * D + 3 * E * 24)
    options: dict[str, Any] = {"layout": "separate", "load_format": "dummy", "forms": TURNED}
    turned = checkpoint.load(Path(), spec, dtype=jnp.bfloat16, **options)["layers"][0]
    assert turned["down"].arrays["turned"].dtype == jnp.int8 and isinstance(turned["down_scale"], jax.Array)


def test_layers_of_one_model_see_one_hidden_state() -> None:
    spec = llama_spec(HfConfig(CONFIG | {"num_experts": 0}))
    attention = GroupedQueryAttention(E, 4, 2, D, spec.norm, scale=D**-0.5)
    assert {layer.attention for layer in spec.layers} == {attention}
    wider = replace(spec.layers[0], attention=replace(attention, hidden_size=2 * E))
    with pytest.raises(ValueError, match="all layers must have hidden states of one size"):
        replace(spec, layers=(*spec.layers, wider))
