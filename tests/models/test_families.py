"""Every family computes what transformers computes, from the config and tensor names that it has there."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.models import checkpoint, families
from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.families import model_spec
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.forms import PLAIN_FORMS, Forms, Matrix
from jaxvllm.models.forms.turned import Turned
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.params import Layout
from pallas_kernels.backend import REFERENCE
from tests.models.dense import dense_logits
from tests.models.fixture import NAMES, Fixture
from tests.models.spec_parts import ON_ONE_DEVICE
from tests.quick import quick_emitters

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "olmo2",
    "smollm3",
    "granite",
    "olmo3",
    "ministral3",
    "glm4",
    "cohere",
    "cohere2",
    "gpt2",
    "opt",
    "exaone4",
    "seed_oss",
    "starcoder2",
    "ernie4_5",
    "gpt_neox",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "granitemoe",
    "qwen3_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "gpt_oss",
    "nemotron",
    "arcee",
    "phi",
    "phimoe",
    "dots1",
    "hunyuan",
    "hunyuan_moe",
    "afmoe",
    "llama4",
    "mimo_v2",
    "cohere2_moe",
    "exaone_moe",
    "hy_v3",
    "gemma",
    "glm",
    "apertus",
    "stablelm",
    "solar_open",
    "flex_olmo",
    "olmo",
    "cwm",
    "internlm3",
    "falcon",
    "gpt_bigcode",
    "laguna",
    "mellum",
    "hyperclovax",
    "jais2",
    "vaultgemma",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "mamba",
    "falcon_mamba",
    "jamba",
    "falcon_h1",
    "kimi_linear",
    "mistral4",
    "youtu",
    "bloom",
    "mpt",
    "gemma3n",
    "bailing_hybrid",
    "longcat_flash",
    "step3p7",
)


TURNED = Forms(layers=Turned(), outside=Turned(), head=Turned())
# A form knows a matrix and no family: those with fused, plain, gated and tied matrices stand for all.
WITH_TURNED = ("llama", "phi3", "gpt2", "gemma4", "qwen3_5")


def load(fixture: Fixture, directory: Path, layout: Layout, forms: Forms = PLAIN_FORMS) -> tuple[Any, Any]:
    spec = model_spec(fixture.config, fixture.max_model_len)
    path = fixture.write_checkpoint(directory)
    return checkpoint.load(path, spec, dtype=jnp.float32, layout=layout, forms=forms), spec


def test_every_module_of_a_family_is_found_by_its_architectures() -> None:
    shared = {"__init__", "family", "mtp_format", "usual"}
    assert {path.stem for path in Path(families.__file__).parent.glob("*.py")} - shared == set(
        families.MODULES.values()
    )
    for architecture in families.MODULES:
        assert families.find_family({"architectures": [architecture]}).architecture == architecture


def test_every_family_has_a_fixture() -> None:
    assert {name.split("-")[0] for name in NAMES} == set(FAMILIES)


# The others are computed over four devices, with stacked layers, in test_families_sharded.
@pytest.mark.parametrize("name", sorted({*ON_ONE_DEVICE, *WITH_TURNED}))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    fixture = Fixture.load(name)
    for forms in (PLAIN_FORMS, *([TURNED] if name in WITH_TURNED else [])):
        params, spec = load(fixture, tmp_path / "model", "separate", forms)
        run = jax.jit(lambda params, tokens, spec=spec: dense_logits(params, spec, tokens))
        with quick_emitters(spec):
            fixture.check(partial(run, params), spec.vocab_size)


def test_turning_round_takes_every_matrix_and_nothing_else(tmp_path: Path) -> None:
    params, spec = load(Fixture.load("llama"), tmp_path / "plain", "separate")
    before = params["layers"][0]
    turned = load(Fixture.load("llama"), tmp_path / "turned", "separate", TURNED)[0]["layers"][0]
    assert {name for name, value in turned.items() if isinstance(value, Matrix)} == {"qkv", "o", "gate_up", "down"}
    array = turned["gate_up"].arrays["turned"]
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, GatedFfn)
    assert array.shape[1:] == (2, ffn.size)
    chex.assert_trees_all_equal(np.moveaxis(array, 0, -1), before["gate_up"])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma3_inside_the_multimodal_checkpoint(prefix: str, tmp_path: Path) -> None:
    plain = Fixture.load("gemma3")
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "torch_dtype": "bfloat16",
    }
    weights = {name.replace("model.", prefix, 1): value for name, value in plain.weights().items()}
    weights["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    assert spec == model_spec(config, plain.max_model_len)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


@pytest.mark.parametrize(
    ("prefix", "beside"), [("model.language_model.", ""), ("language_model.model.", "language_model.")]
)
def test_ministral3_inside_the_multimodal_checkpoint(prefix: str, beside: str, tmp_path: Path) -> None:
    """Its LM head, which is no embedding, has a name of its own."""
    plain = Fixture.load("ministral3")
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    names = {"lm_head.weight": f"{beside}lm_head.weight"}
    weights = {names.get(name, name.replace("model.", prefix, 1)): value for name, value in plain.weights().items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    assert spec == model_spec(config, plain.max_model_len)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)
    # That of Mistral Small 3.1 is an older Mistral.
    older = model_spec(config | {"text_config": text | {"model_type": "mistral", "sliding_window": None}})
    [layer] = set(older.layers)
    assert isinstance(layer.attention, GroupedQueryAttention)
    assert layer.attention.q_growth is None and layer.window is None


def test_mistral4_inside_the_multimodal_checkpoint(tmp_path: Path) -> None:
    plain = Fixture.load("mistral4")
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    weights = {name.replace("model.", "model.language_model.", 1): value for name, value in plain.weights().items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    assert spec == model_spec(config, plain.max_model_len)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma4", "Gemma4ForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("deepseek_v3", "KimiK25ForConditionalGeneration"),
        ("deepseek_v3", "Kimi_K25ForConditionalGeneration"),
    ],
)
def test_a_multimodal_checkpoint_has_the_same_model_under_other_names(
    name: str, architecture: str, tmp_path: Path
) -> None:
    plain, prefix = Fixture.load(name), "model.language_model."
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    config = {"architectures": [architecture], "text_config": text}
    spec = model_spec(config, plain.max_model_len)
    assert spec == model_spec(plain.config, plain.max_model_len)
    weights = {name.replace("model.", prefix, 1): value for name, value in plain.weights().items()}
    save_file(weights, tmp_path / "model.safetensors")
    stored = StoredWeights.open(tmp_path, config, spec)
    expected = StoredWeights.open(plain.write_checkpoint(tmp_path / "plain"), plain.config, spec)
    for found, like in zip((stored.outer, *stored.layers), (expected.outer, *expected.layers), strict=True):
        named = {
            key: tuple(replace(one, name=one.name.replace("model.", prefix, 1)) for one in like[key]) for key in like
        }
        assert found == named


def test_published_experts_of_qwen3_5_are_stacks(tmp_path: Path) -> None:
    """They are so inside the multimodal checkpoint, and transformers writes them one by one for text alone."""
    plain = Fixture.load("qwen3_5_moe")
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    weights, count = plain.weights(), text["num_experts"]
    for layer in range(text["num_hidden_layers"]):
        start = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([weights.pop(f"{start}{number}.{name}_proj.weight") for number in range(count)])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{start}gate_up_proj": np.concatenate([gate, up], axis=1), f"{start}down_proj": down}
    weights = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    assert spec == model_spec(config, plain.max_model_len)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


def test_gemma3n_inside_the_multimodal_checkpoint(tmp_path: Path) -> None:
    """Its config lists the sizes of layers, and it has keys and values of layers that read those of others."""
    plain = Fixture.load("gemma3n")
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    text["intermediate_size"] = [text["intermediate_size"]] * text["num_hidden_layers"]
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    weights = {name.replace("model.", "model.language_model.", 1): value for name, value in plain.weights().items()}
    unread = ("language_model.layers.6.self_attn.k_proj.weight", "audio_tower.conformer.0.weight")
    weights |= {f"model.{name}": np.zeros((2, 2), np.float32) for name in unread}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    assert spec == model_spec(config, plain.max_model_len)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-keys"])
def test_gemma4_whose_config_has_the_sizes_of_full_layers_by_number(name: str) -> None:
    """transformers 5.23 saves it so, and leaves out the keys of published configs."""
    config = Fixture.load(name).config
    published = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    sizes = {ours: config[key] for ours, key in published.items() if key in config}
    full = [str(number) for number, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    saved = {key: value for key, value in config.items() if key not in published.values()}
    assert model_spec(saved | {"per_layer_config": dict.fromkeys(full, sizes)}) == model_spec(config)
    for wrong in ({full[0]: sizes}, dict.fromkeys(full, sizes | {"window": 2}), {full[0]: sizes, full[1]: {}}):
        with pytest.raises(ValueError, match="per_layer_config must give all full layers"):
            model_spec(saved | {"per_layer_config": wrong})


def test_llama4_inside_the_multimodal_checkpoint(tmp_path: Path) -> None:
    plain = Fixture.load("llama4")
    text = {key: value for key, value in plain.config.items() if key != "architectures"}
    config = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    weights = {f"language_model.{name}": value for name, value in plain.weights().items()}
    weights["vision_model.class_embedding"] = np.zeros(2, np.float32)
    weights["multi_modal_projector.linear_1.weight"] = np.zeros((2, 2), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    assert spec == model_spec(config, plain.max_model_len)
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


def test_the_first_checkpoints_of_gpt2_have_masks_and_no_prefix(tmp_path: Path) -> None:
    plain = Fixture.load("gpt2")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    weights = {name.removeprefix("transformer."): value for name, value in plain.weights().items()}
    weights |= {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32), "h.0.attn.masked_bias": np.zeros(1, np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(plain.config))
    save_file(weights, tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


def test_the_first_checkpoints_of_gpt_neox_name_the_lm_head_otherwise(tmp_path: Path) -> None:
    plain = Fixture.load("gpt_neox")
    expected, spec = load(plain, tmp_path / "plain", "separate")
    weights = {name.replace("lm_head", "embed_out"): value for name, value in plain.weights().items()}
    weights |= {"gpt_neox.layers.0.attention.masked_bias": np.zeros(1, np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(plain.config))
    save_file(weights, tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(checkpoint.load(tmp_path, spec, dtype=jnp.float32, layout="separate"), expected)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_a_published_config_of_step3p7_has_other_keys() -> None:
    """Its lists go on with the layers that predict further tokens."""
    config = Fixture.load("step3p7").config
    text = dict(config["text_config"])
    old = {
        "moe_num_experts": text.pop("n_routed_experts"),
        "moe_top_k": text.pop("num_experts_per_tok"),
        "num_attention_groups": text.pop("num_key_value_heads"),
        "attention_other_setting": {"num_attention_heads": text.pop("num_sliding_attention_heads")},
        "layer_types": [*text.pop("layer_types"), "full_attention"],
        "swiglu_limits": [*text.pop("swiglu_limits"), 0.0],
    }
    assert model_spec(config | {"text_config": text | old}) == model_spec(config)
    new = {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"], "moe_layers_enum": None}
    assert model_spec(config | {"text_config": config["text_config"] | new}) == model_spec(config)


def test_old_and_new_spellings_of_a_config_mean_the_same() -> None:
    gemma3 = Fixture.load("gemma3").config
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    new = without(gemma3, "rope_theta", "rope_local_base_freq", "rope_scaling") | {
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert model_spec(new) == model_spec(gemma3)
    llama = Fixture.load("llama-rope").config
    parameters = dict(llama["rope_parameters"])
    old = without(llama, "rope_parameters") | {"rope_theta": parameters.pop("rope_theta")}
    old["rope_scaling"] = without(parameters, "rope_type") | {"type": "llama3"}
    assert model_spec(old) == model_spec(llama)
    glm = Fixture.load("glm_moe_dsa").config
    types, period = ["full", "full", "shared", "shared"], {"index_topk_freq": 3, "index_skip_topk_offset": 2}
    for same in ({"indexer_types": types}, period):
        assert model_spec(without(glm, "index_topk_pattern") | same) == model_spec(glm)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"architectures": ["GPTJForCausalLM"]}, "GPTJForCausalLM.*supported are LlamaForCausalLM,"),
        ("llama", {"architectures": None}, "architecture None is not supported"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act must be one of silu.*not 'tanh'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.*not supported"),
        ("llama", {"rope_scaling": {"rope_type": "magic"}}, "rope type 'magic' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope factor must be a positive number, not None"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling must be an object"),
        ("llama", {"hidden_size": None}, "lacks hidden_size"),
        ("llama", {"hidden_size": "84"}, "hidden_size must be an integer"),
        ("llama", {"num_key_value_heads": 2}, "num_heads 7 must be a multiple of num_kv_heads 2"),
        ("llama", {"vocab_size": -1}, "vocab_size must be an integer of at least 1, not -1"),
        ("llama", {"num_hidden_layers": 10**400}, "num_hidden_layers must be at most 10000, not 1000"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, not 0"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act must be one of silu.*not \['silu'\]"),
        ("gemma3", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a positive number, not -1"),
        ("gemma3", {"rope_parameters": {"full_attention": 1}}, "rope_parameters must hold an object for each"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "layer_types must be a list of 7"),
        ("phi3-longrope", {"rope_scaling": {"type": "longrope"}}, "long_factor must list 6 numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be 5 of 0 and 1"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False is not supported"),
        ("opt", {"word_embed_proj_dim": 42}, "word_embed_proj_dim = 42 is not supported"),
        ("opt", {"num_attention_heads": 5}, "hidden_size 84 must be a multiple of num_attention_heads 5"),
        ("bloom", {"n_head": 5}, "hidden_size 84 must be a multiple of n_head 5"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi = False is not supported"),
        ("mpt", {"attn_config": 3}, "attn_config must be an object, not 3"),
        ("gemma3n", {"altup_num_inputs": 9}, "altup_num_inputs must be at most 8, not 9"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must be .* a list of 7, not"),
        ("bailing_hybrid", {"kda_lower_bound": 1}, "kda_lower_bound must be a number below 0, not 1"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type = 'copy' is not supported"),
        ("glm_moe_dsa", {"index_topk_pattern": "SFSS"}, "layer 0 must have an index of its own"),
        ("glm_moe_dsa", {"index_topk_pattern": "FFSX"}, "must be a text of 4 letters F and S, not 'FFSX'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm = True"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "needs original_max_position_embeddings"),
        ("lfm2", {"layer_types": ["mamba"] * 5}, "layer_types must be a list of 5 of full_attention and conv"),
        ("lfm2_moe", {"layer_types": None}, "lacks layer_types"),
        ("falcon_h1", {"ssm_multipliers": [1, 2]}, r"ssm_multipliers must be a list of 5 numbers, not \[1, 2\]"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias must be as mamba_proj_bias, which is False"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias is not supported with attention_in_multiplier 1.2"),
        ("mamba2", {"time_step_limit": [0.1]}, r"time_step_limit must be two numbers.*not \[0.1\]"),
        ("mamba2", {"n_groups": 5}, "n_groups 5 must divide the 12 heads of Mamba-2"),
        ("mamba2", {"expand": 2}, "num_heads 12 of head_dim 12 must be the 96 that expand says"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1]}},
            r"must list each layer from 1 to 4 once, in full_attn_layers or kda_layers, not \[2, 4\] and \[1\]",
        ),
        ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5}}, "linear_attn_config must be an object of"),
        (
            "mistral4",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 must be that of qk_rope_head_dim 8 of 20",
        ),
        ("gemma4-experts", {"top_k_experts": None}, "config lacks top_k_experts"),
        ("gemma4-experts", {"top_k_experts": 7}, "7 of 6 experts cannot be chosen"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False is not supported"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M--"},
            "layer 2 must not be mlp: it follows no Mamba-2 or attention",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "MX"},
            "hybrid_override_pattern a text of M \\* E -, not None and 'MX'",
        ),
    ],
)
def test_what_is_not_understood_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_spec(Fixture.load(name).config | change)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(name: str) -> None:
    config = Fixture.load(name).config
    more = {"no_rope_layer_interval", "sliding_window_pattern", "max_window_layers", "layer_types", "per_layer_config"}
    for key in config.keys() | more:
        for value in (0, -1, 2.5, True, "x", [], ["x"], [[]], {}, {"x": 1}, float("nan"), float("inf"), None):
            try:
                model_spec(config | {key: value})
            except ValueError as error:
                assert "\n" not in str(error)


def test_no_longer_than_the_model_can() -> None:
    config = Fixture.load("llama-linear").config
    assert model_spec(config).max_position == 128
    with pytest.raises(ValueError, match="max_model_len 129 exceeds the 128 positions"):
        model_spec(config, 129)
    with pytest.raises(ValueError, match="max_model_len must be at least 1"):
        model_spec(config, 0)


def test_lengths_choose_the_rope() -> None:
    longrope = Fixture.load("phi3-longrope").config
    short, long = model_spec(longrope, 32), model_spec(longrope, 33)
    assert short.ropes != long.ropes
    assert long.ropes == model_spec(longrope).ropes
    phimoe = Fixture.load("phimoe").config | {"max_position_embeddings": 256}
    assert [model_spec(phimoe, length).ropes[0].scale for length in (128, 129)] == [1.2, 1.4]
    dynamic = Fixture.load("llama-dynamic").config
    assert model_spec(dynamic, 64).ropes == model_spec(dynamic, 10).ropes != model_spec(dynamic, 65).ropes


def test_attention_in_chunks_needs_whole_pages_and_long_sequences() -> None:
    config = Fixture.load("llama4").config
    memory = model_spec(config).layers[0].memory
    assert memory == model_spec(config, 33).layers[0].memory == KeysAndValues(2, 12, 32, chunk=32)
    with pytest.raises(ValueError, match="page_size 64 must divide the 32 positions of a chunk"):
        memory.pages(1, 2, 64, jnp.float32, REFERENCE)
    assert {layer.memory for layer in model_spec(config, 32).layers} == {KeysAndValues(2, 12, None)}


def test_specs_are_values() -> None:
    config = Fixture.load("gemma3").config
    assert hash(model_spec(config)) == hash(model_spec(config))
