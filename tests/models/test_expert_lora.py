"""Adapters of experts: what PEFT computes with those of parameters, and which of its files are refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import PLAIN_FORMS
from jaxvllm.models.lora_arrays import LoraArrays, LoraRoom
from jaxvllm.models.params import Layout
from jaxvllm.models.peft import PeftAdapter
from sharding.mesh import MeshShape
from tests.models.adapters import PeftFixture, RandomAdapter
from tests.models.fixture import Fixture
from tests.models.test_lora import KERNELS, NUM_SLOTS, RANK, adapted_logits, arrays_of, with_adapters
from tests.quick import quick_emitters


# The modules of Mixtral's experts have other names in a checkpoint, the matrices of gpt-oss are turned round and
# interleaved, and PEFT exchanges A and B for those of Llama 4.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3_moe", "kernel"),
        ("mixtral", "stacked"),
        ("gpt_oss", "kernel"),
        ("llama4", "masked"),
    ],
)
def test_parameters_of_experts_compute_what_peft_computes(name: str, way: str, tmp_path: Path) -> None:
    fixture, theirs = Fixture.load(name), PeftFixture.load(name)
    layout: Layout = "stacked" if way == "stacked" else "separate"
    arrays = arrays_of(fixture, layout, KERNELS if way == "kernel" else PLAIN_FORMS)
    adapter = PeftAdapter.read(theirs.write(tmp_path / "adapter"), arrays.sizes, RANK, outside=arrays.outside)
    spec = model_spec(fixture.config, fixture.max_model_len)
    base = checkpoint.load(fixture.write_checkpoint(tmp_path / "model"), spec, dtype="float32", layout=layout)
    params = with_adapters(arrays, base, {NUM_SLOTS: adapter})
    length = 33
    run = jax.jit(
        lambda params, tokens, slot: adapted_logits(params, arrays.spec, tokens, jnp.full(length, slot, jnp.int32))
    )
    with quick_emitters(spec):
        for prompt, plain, adapted in zip(fixture.prompts, fixture.logits, theirs.logits, strict=True):
            if len(prompt) in (7, length):
                tokens = np.zeros(length, np.int32)
                tokens[: len(prompt)] = prompt
                for slot, logits in ((0, plain), (NUM_SLOTS, adapted)):
                    found = np.asarray(run(params, tokens, slot))[len(prompt) - 1]
                    np.testing.assert_allclose(found, logits, atol=2e-4)


FUSED = "base_model.model.model.layers.2.mlp.experts"
SINGLE = "base_model.model.model.layers.2.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: t.pop(f"{FUSED}.lora_B.weight"), {}, "mlp.experts has only lora_A.weight"),
        (
            lambda t: t.update({f"{FUSED}.lora_A.weight": t[f"{FUSED}.lora_A.weight"][:, 1:]}),
            {},
            r"layers\.2\.mlp\.experts\.lora_A\.weight has shape \[18, 23\].*down_proj A \[\.\., 24\]",
        ),
        (
            lambda t: t.update({f"{FUSED}.lora_A.weight": t[f"{FUSED}.lora_A.weight"][1:]}),
            {},
            r"layers\.2\.mlp\.experts\.lora_A\.weight has shape \(17, 24\)",
        ),
        (lambda t: t.update({f"{FUSED}.lora_A.weight": t[f"{FUSED}.lora_A.weight"][0]}), {}, "fit no parameter"),
        (
            lambda t: t.update({f"{FUSED}.lora_{s}.weight": t[f"{FUSED}.base_layer.lora_{s}.weight"] for s in "AB"}),
            {},
            "fit no parameter of model.layers.2.mlp.experts that is left, which are down_proj",
        ),
        (
            lambda t: t.update({f"{SINGLE}.lora_{s}.weight": np.zeros((3, 3), np.float32) for s in "AB"}),
            {},
            "all experts of model.layers.2.mlp.experts together and model.layers.2.mlp.experts.3.up_proj as well",
        ),
        (lambda t: t.update({f"{FUSED}.lora_B.weight": t[f"{FUSED}.lora_B.weight"] * np.inf}), {}, "not finite"),
        (lambda t: None, {"rank_pattern": {"gate_up_proj": 9}}, "experts.gate_up_proj has rank 9"),
        (lambda t: None, {"rank_pattern": {r".*\.down_proj": 2}}, r"\(18, 24\), and the config makes it \(12, 24\)"),
        (lambda t: None, {"rank_pattern": {r".*\.down_.*": 2}}, "no expression"),
    ],
)
def test_damaged_parameters(
    change: Callable[[dict[str, np.ndarray]], object], config: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    theirs = PeftFixture.load("qwen3_moe")
    tensors = dict(theirs.tensors)
    change(tensors)
    with np.errstate(invalid="ignore"):
        replace(theirs, tensors=tensors, config={**theirs.config, **config}).write(tmp_path)
    with pytest.raises(ValueError, match=message):
        PeftAdapter.read(tmp_path, arrays_of(Fixture.load("qwen3_moe"), "separate").sizes, RANK)


def test_scales_of_parameters(tmp_path: Path) -> None:
    """PEFT states the rank and alpha of a parameter, into which it has joined modules, by the end of its name."""
    theirs, sizes = PeftFixture.load("qwen3_moe"), arrays_of(Fixture.load("qwen3_moe"), "separate").sizes
    plain = PeftAdapter.read(theirs.write(tmp_path), sizes, RANK).modules
    changed = replace(theirs, config={**theirs.config, "alpha_pattern": {r".*\.gate_up_proj": 18}})
    scaled = PeftAdapter.read(changed.write(tmp_path), sizes, RANK).modules
    for name, own in plain.items():
        factor = 3 if name.endswith("gate_up_proj") else 1
        np.testing.assert_allclose(scaled[name].up, factor * own.up, rtol=1e-6)


def test_dora_of_experts(tmp_path: Path) -> None:
    fixture = Fixture.load("qwen3_moe")
    adapter = RandomAdapter(fixture, seed=1, ends=("experts.0.up_proj",))
    tensors = adapter.tensors()
    adapter.write(tmp_path)
    for name in list(tensors):
        if name.endswith("lora_B.weight"):
            tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = np.ones(24, np.float32)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"use_dora": True}
    PeftFixture(config, tensors, np.zeros(0)).write(tmp_path)
    with pytest.raises(NotImplementedError, match=r"DoRA of model\.layers\.0\.mlp\.experts\.0\.up_proj"):
        PeftAdapter.read(tmp_path, arrays_of(fixture, "separate").sizes, RANK)


def test_modules_that_are_left_out(tmp_path: Path) -> None:
    fixture = Fixture.load("qwen3_moe")
    spec, family = model_spec(fixture.config, 128), find_family(fixture.config)

    def of(*targets: str) -> LoraArrays:
        ways = MeshShape(1, 1), "separate", "float32", PLAIN_FORMS
        return LoraArrays.of(spec, family, *ways, LoraRoom(1, RANK, targets))

    arrays = of("self_attn", "model.layers.0.mlp.gate")
    assert all(layer.expert_lora is None for layer in arrays.spec.layers) and arrays.spec.lora is None
    RandomAdapter(fixture, seed=1, ends=("q_proj", "layers.0.mlp.gate")).write(tmp_path)
    arrays.of_adapter(PeftAdapter.read(tmp_path, arrays.sizes, RANK).modules)
    PeftFixture.load("qwen3_moe").write(tmp_path)
    with pytest.raises(NotImplementedError, match=r"experts\.down_proj: lora_target_modules leaves it out"):
        PeftAdapter.read(tmp_path, arrays.sizes, RANK)
    assert {len(layer.lora_rooms) for layer in of("experts").spec.layers} == {0, 1}
    with pytest.raises(ValueError, match="has 'qkv_proj', and this model's modules end with"):
        of("o_proj", "qkv_proj")
    with pytest.raises(ValueError, match="must name a module of the layers"):
        of("lm_head")
