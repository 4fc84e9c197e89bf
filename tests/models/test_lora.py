"""Adapters: what they add to each family's model, in every layout and way, and which files are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.models import checkpoint, peft
from jaxvllm.models.decoder import (
    begin_layers,
    embed_tokens,
    end_layers,
    final_norm,
    for_head,
    project_logits,
    run_part,
)
from jaxvllm.models.dora import of_one_slot, with_ratios
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.lora import LAYERS, LORA, MOST_MASKED
from jaxvllm.models.lora_arrays import LoraArrays, LoraRoom
from jaxvllm.models.outer_lora import columns_by_product
from jaxvllm.models.params import Layout, Params, abstract_params
from jaxvllm.models.peft import PeftAdapter
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.table_arrays import with_table
from jaxvllm.models.token_adapters import TokenAdapters
from jaxvllm.runtime.adapter_fills import SlotAxes, fill_adapter
from pallas_kernels.backend import REFERENCE
from pallas_kernels.cpu.host import host_chip
from sharding.axis import ALONE
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, mesh_of
from tests.models.adapters import RandomAdapter
from tests.models.dense import dense_attend, dense_cache, dense_logits, dense_recur
from tests.models.fixture import Fixture
from tests.quick import quick_emitters

# Separate and fused projections, biases, matrices that are stored turned, gates in queries, latents, experts.
FAMILIES = ("llama", "phi3", "gpt2", "gpt_neox", "qwen3_5", "deepseek_v3")
RANK, NUM_SLOTS = 8, 3
KERNELS = Forms(adapters=CpuKernel(host_chip()), expert_adapters=CpuKernel(host_chip()))


def arrays_of(fixture: Fixture, layout: Layout, forms: Forms = PLAIN_FORMS, num_slots: int = NUM_SLOTS) -> LoraArrays:
    spec, family = model_spec(fixture.config, fixture.max_model_len), find_family(fixture.config)
    return LoraArrays.of(spec, family, MeshShape(1, 1), layout, "float32", forms, LoraRoom(num_slots, RANK))


def with_adapters(arrays: LoraArrays, params: Params, adapters: dict[int, PeftAdapter]) -> Params:
    """The parameters with these adapters in these slots."""
    slots = arrays.empty(mesh_of(jax.devices()[0]))
    fill = jax.jit(partial(fill_adapter, axes=SlotAxes.of(arrays.spec), is_shared=False))
    for number, adapter in adapters.items():
        one = arrays.of_adapter(adapter.modules)
        if adapter.has_magnitudes:
            ratios = jax.jit(partial(with_ratios, spec=of_one_slot(arrays.spec), axis=ALONE))
            one |= {LAYERS: ratios(one[LAYERS], params["layers"])}
        slots = fill(slots, one, jnp.array([number, number]))
    return params | {LORA: slots}


def adapted_logits(params: Params, spec: ModelSpec, tokens: list[int], slots: list[int]) -> jax.Array:
    """f32[T, V] for a sequence whose tokens have the adapters in `slots`."""
    ids, positions = jnp.asarray(tokens, jnp.int32), jnp.arange(len(tokens), dtype=jnp.int32)
    of_tokens = TokenAdapters.of(jnp.asarray(slots, jnp.int32), spec.num_lora_slots)
    x = begin_layers(params, spec, embed_tokens(params, spec, ids, positions, adapters=of_tokens))
    ways: Any = (ALONE, (), None, dense_recur, None, None, None, REFERENCE, of_tokens)
    x, _, _ = run_part(params, spec, x, positions, dense_cache(spec, len(tokens)), dense_attend, *ways)
    hidden = final_norm(params, spec, end_layers(params, spec, x))
    return project_logits(params, spec, for_head(params, spec, hidden, of_tokens))


def read(adapter: RandomAdapter, directory: Path, arrays: LoraArrays) -> PeftAdapter:
    return PeftAdapter.read(adapter.write(directory), arrays.sizes, RANK, outside=arrays.outside)


# The ways differ in nothing that depends on the family. DeepSeek V3 has layers of two kinds.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "masked") for name in FAMILIES),
        ("llama", "kernel"),
        ("llama", "stacked"),
        ("deepseek_v3", "stacked"),
        ("llama", "many slots"),
        ("llama", "many slots, stacked"),
    ],
)
def test_adapters_compute_what_merged_weights_compute(name: str, way: str, tmp_path: Path) -> None:
    fixture = Fixture.load(name)
    layout: Layout = "stacked" if "stacked" in way else "separate"
    has_many = "many slots" in way
    forms = KERNELS if way == "kernel" else PLAIN_FORMS
    arrays = arrays_of(fixture, layout, forms, MOST_MASKED + 1 if has_many else NUM_SLOTS)
    one_by_one = has_many or way == "kernel"
    assert {layer.lora.one_by_one for layer in arrays.spec.layers if layer.lora} == {one_by_one}
    adapter = RandomAdapter(fixture, seed=3, config={"use_rslora": True, "use_dora": True})
    other = RandomAdapter(fixture, seed=4, rank=2)
    both = {2: read(adapter, tmp_path / "a", arrays), 3: read(other, tmp_path / "b", arrays)}
    directory = fixture.write_checkpoint(tmp_path / "model")
    base = model_spec(fixture.config, fixture.max_model_len)
    # Adapters of one table that is both do not change each other's product.
    apart = replace(base, tie_embeddings=False)

    def load(spec: ModelSpec = base, **more: Any) -> Params:
        return checkpoint.load(directory, spec, dtype="float32", layout=layout, **more)

    params = with_adapters(arrays, load(), both)
    [tokens] = [prompt for prompt in fixture.prompts if len(prompt) == max(map(len, fixture.prompts))][:1]
    tokens = tokens[:20]
    run = jax.jit(lambda params, slots: adapted_logits(params, arrays.spec, tokens, slots))
    plain = jax.jit(lambda params: dense_logits(params, base if "lm_head" not in params else apart, tokens))
    with quick_emitters(base):
        found = {slot: np.asarray(run(params, jnp.full(len(tokens), slot))) for slot in (0, 2, 3)}
        expected = {
            0: plain(load()),
            2: plain(load(tensors=adapter.merged())),
            3: plain(load(apart, tensors=other.merged())),
        }
    spread = float(np.abs(np.asarray(expected[0]) - np.asarray(expected[2])).max())
    assert spread > 0.1, "the adapter changes something"
    for slot, logits in expected.items():
        np.testing.assert_allclose(found[slot], np.asarray(logits), atol=2e-4 * max(1.0, spread))


# What is refused.

FIXTURE = Fixture.load("llama")
GOOD = RandomAdapter(FIXTURE, seed=1)
FIRST = "model.layers.0.self_attn.q_proj"
TABLE, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
ZEROS = np.zeros((131, 84), np.float32)


def damaged(directory: Path, change: Callable[[dict[str, np.ndarray]], object], **config: Any) -> Path:
    """An adapter whose tensors were changed."""
    adapter = RandomAdapter(FIXTURE, seed=1, config=config)
    tensors = adapter.tensors()
    change(tensors)
    save_file(tensors, adapter.write(directory) / "adapter_model.safetensors")
    return directory


def only_head(tensors: dict[str, np.ndarray], head: np.ndarray) -> None:
    """Lets the tensors have an LM head whole, and no adapter of it."""
    for side in "AB":
        del tensors[at("lm_head", side)]
    tensors[f"{HEAD}.weight"] = head


def at(name: str, side: str) -> str:
    return f"base_model.model.{name}.lora_{side}.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(at(FIRST, "B")), "only lora_A"),
        (lambda t: t.update({at(FIRST, "A"): t[at(FIRST, "A")][:, 1:]}), "has shape"),
        (lambda t: t.update({at(FIRST, "B"): t[at(FIRST, "B")].T.copy()}), "has shape"),
        (lambda t: t.update({at(FIRST, "B"): t[at(FIRST, "B")] * np.float32(np.nan)}), "not finite"),
        (lambda t: t.update({at(FIRST, "A"): t[at(FIRST, "A")].astype(np.int32)}), "dtype"),
        (lambda t: t.update({at("model.layers.99.mlp.up_proj", s): t[at(FIRST, s)] for s in "AB"}), "layers.99"),
        (lambda t: t.update({at("../../etc/passwd", s): t[at(FIRST, s)] for s in "AB"}), "can be adapted"),
        (lambda t: t.update({f"{HEAD}.weight": t[at(FIRST, "A")]}), "adapts lm_head and has it whole as well"),
        (lambda t: only_head(t, t[at(FIRST, "A")]), r"lm_head.weight has shape .* and the model's is \[131, 84\]"),
        (lambda t: only_head(t, np.full((131, 84), np.inf, np.float32)), "not finite"),
        (lambda t: only_head(t, ZEROS) or t.update({f"{HEAD}.bias": ZEROS[:, 0]}), "LM heads without a bias"),
        (lambda t: t.update({f"{TABLE}.base_layer.weight": t[at(FIRST, "A")]}), "another vocabulary"),
        (lambda t: t.update({f"{TABLE}.lora_embedding_A": t[f"{TABLE}.lora_embedding_A"][:, 1:]}), "has shape"),
        (lambda t: t.pop(f"{TABLE}.lora_embedding_A"), "needs lora_A"),
        (lambda t: t.update({f"{at(FIRST, 'A')}.bias": t[at(FIRST, "A")]}), "unexpected tensor"),
        (lambda t: t.clear(), "no tensor"),
    ],
)
def test_damaged_weights(change: Callable[[dict[str, np.ndarray]], object], message: str, tmp_path: Path) -> None:
    directory, arrays = damaged(tmp_path, change), arrays_of(FIXTURE, "separate")
    with pytest.raises(ValueError, match=message):
        PeftAdapter.read(directory, arrays.sizes, RANK, outside=arrays.outside, takes_tables=True)


def test_whole_tables(tmp_path: Path) -> None:
    adapter = RandomAdapter(FIXTURE, seed=1, ends=("q_proj",), tables=("lm_head",))
    spec, family = model_spec(FIXTURE.config, FIXTURE.max_model_len), find_family(FIXTURE.config)

    def of(*targets: str) -> LoraArrays:
        ways = MeshShape(1, 1), "separate", "float32", PLAIN_FORMS
        return LoraArrays.of(spec, family, *ways, LoraRoom(2, RANK, targets, num_tables=1))

    def digest(arrays: LoraArrays, takes_tables: bool = True) -> bytes:
        return PeftAdapter.read(tmp_path, arrays.sizes, RANK, "float32", arrays.outside, takes_tables).digest

    adapter.write(tmp_path)
    with pytest.raises(ValueError, match="lm_head whole .* set max_lora_heads"):
        digest(of("self_attn", "lm_head"), takes_tables=False)
    with pytest.raises(NotImplementedError, match="replaces lm_head: lora_target_modules leaves it out"):
        digest(of("self_attn", "embed_tokens"))
    with pytest.raises(ValueError, match="name lm_head or embed_tokens there"):
        of("self_attn")
    first = digest(of("self_attn", "lm_head"))
    tensors = adapter.tensors()
    tensors[f"{HEAD}.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert digest(of("self_attn", "lm_head")) != first
    # A step computes with room for one of both.
    mesh = mesh_of(jax.devices()[0])
    params = abstract_params(spec, "float32", "separate", mesh)
    for target in ("lm_head", "embed_tokens"):
        arrays = of("self_attn", target)
        with_room = params | {LORA: arrays.empty(mesh)}
        step = partial(adapted_logits, spec=arrays.spec, tokens=[1, 2], slots=[1, 0])
        assert jax.eval_shape(step, with_room).shape == (2, 131)


def test_each_replica_of_a_mesh_has_tables_of_its_own() -> None:
    spec, family = model_spec(FIXTURE.config, FIXTURE.max_model_len), find_family(FIXTURE.config)
    shape, room = MeshShape(2, 2), LoraRoom(2, RANK, num_tables=1)
    arrays = LoraArrays.of(spec, family, shape, "separate", "float32", PLAIN_FORMS, room).tables
    assert arrays is not None
    [before] = tables = arrays.empty(make_mesh(shape, jax.devices()))["lm_head"]
    heads = np.random.default_rng(0).random((3, *ZEROS.shape), np.float32)
    for head, replica in zip(heads, (0, 1, 0), strict=True):
        tables = with_table(tables, 1, arrays.of_adapter({"lm_head": head})["lm_head"], replica, num_replicas=2)
    first, second = np.split(np.asarray(tables[0]), 2)
    np.testing.assert_array_equal(first[: len(ZEROS)], heads[2])
    np.testing.assert_array_equal(second[: len(ZEROS)], heads[1])
    assert before.is_deleted(), "nobody keeps what was there before"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"r": 16}, ValueError, "max_lora_rank is 8"),
        ({"rank_pattern": {"q_proj": 9}}, ValueError, "rank 9"),
        ({"r": True}, ValueError, "positive integer"),
        ({"r": "4"}, ValueError, "positive integer"),
        ({"lora_alpha": float("inf")}, ValueError, "finite"),
        ({"lora_alpha": 10**400}, ValueError, "finite"),
        ({"lora_alpha": 1e300}, ValueError, "lora_B.weight of .* has numbers that are not finite"),
        ({"lora_alpha": None}, ValueError, "lora_alpha .* not None"),
        ({"rank_pattern": {"(a+)+$": 4}}, ValueError, "no expression"),
        ({"rank_pattern": [1]}, ValueError, "rank_pattern must be an object"),
        ({"modules_to_save": "lm_head"}, ValueError, "modules_to_save must be a list"),
        ({"use_dora": True}, ValueError, "needs lora_magnitude_vector"),
        ({"use_dora": 1}, ValueError, "use_dora must be true or false"),
        ({"bias": "all"}, NotImplementedError, "bias 'all'"),
        ({"modules_to_save": ["score"]}, NotImplementedError, "modules_to_save 'score' .* calls embed_tokens, lm_head"),
        ({"modules_to_save": ["lm_head"]}, ValueError, "lacks the weight of lm_head, which modules_to_save names"),
        ({"init_lora_weights": "pissa"}, NotImplementedError, "pissa"),
        ({"init_lora_weights": ["pissa"]}, NotImplementedError, "pissa"),
        ({"peft_type": "IA3"}, NotImplementedError, "IA3"),
        ({"alora_invocation_tokens": [1]}, NotImplementedError, "alora"),
        ({"fan_in_fan_out": True}, NotImplementedError, "fan_in_fan_out"),
    ],
)
def test_configs(config: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    GOOD.write(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    arrays = arrays_of(FIXTURE, "separate")
    with pytest.raises(error, match=message):
        PeftAdapter.read(tmp_path, arrays.sizes, RANK, outside=arrays.outside)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = arrays_of(FIXTURE, "separate").sizes
    with pytest.raises(ValueError, match="has no adapter_config.json"):
        PeftAdapter.read(tmp_path, sizes, RANK)
    GOOD.write(tmp_path)
    first = PeftAdapter.read(tmp_path, sizes, RANK)
    assert PeftAdapter.read(tmp_path, sizes, RANK).digest == first.digest
    weights = tmp_path / "adapter_model.safetensors"
    content = weights.read_bytes()

    def others_write(*given: Any) -> Any:
        weights.write_bytes(bytes(len(content)))
        (tmp_path / "adapter_config.json").write_text("{}")
        return modules_of(*given)

    modules_of = peft._modules
    with monkeypatch.context() as patch:
        patch.setattr(peft, "_modules", others_write)
        assert PeftAdapter.read(tmp_path, sizes, RANK).digest == first.digest, "both files are read once, at first"
    GOOD.write(tmp_path)
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        PeftAdapter.read(tmp_path, sizes, RANK)
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model\.bin: such files can run code"):
        PeftAdapter.read(tmp_path, sizes, RANK)
    for text, message in (
        ("[1]", "JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (" " * (2 << 20), "bytes"),
    ):
        GOOD.write(tmp_path)
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            PeftAdapter.read(tmp_path, sizes, RANK)
    # Another alpha is another adapter, though the tensors are the same.
    RandomAdapter(FIXTURE, seed=1, alpha=16).write(tmp_path)
    assert PeftAdapter.read(tmp_path, sizes, RANK).digest != first.digest


def test_a_product_tells_the_columns_of_an_embedding_exactly() -> None:
    down = np.random.default_rng(0).standard_normal((8, 131), np.float32)
    ids = np.array([130, 0, 7, 7], np.int32)
    np.testing.assert_array_equal(columns_by_product(jnp.asarray(down), jnp.asarray(ids)), down[:, ids].T)
