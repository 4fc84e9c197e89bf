"""Kimi Linear: Kimi delta attention, with a layer of latent attention without positions to three, and experts."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families.deepseek_v2 import latent_attention, latent_attention_sources
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.kimi_delta import ChannelDelta, KimiDeltaNet
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    expert_sources,
    gated_ffn_sources,
    gated_sources,
    named_norms,
    norm_sources,
    rows_of_heads,
    whole,
    with_biases,
)

LINEAR, FULL = "linear_attention", "full_attention"
# What configs call the keys that other models with latent attention and experts have.
SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# What the sizes of linear attention are called inside `linear_attn_config`, and what transformers calls them.
_INNER = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LISTS = ("full_attn_layers", "kda_layers")


def kimi_linear_spec(config: HfConfig) -> ModelSpec:
    config = _usual_spelling(config)
    # The convolution of linear attention has the activation of the FFNs, and ours knows one.
    neutral = {"mla_use_nope": (None, True), "moe_layer_freq": (None, 1), "hidden_act": (None, "silu", "swish")}
    config.refuse(neutral | {"moe_router_activation_func": (None, "sigmoid"), "rope_scaling": (None,)})
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    size = config.integer("moe_intermediate_size", 1024)
    shared_size = size * (config.optional_integer("n_shared_experts", 1, least=0) or 0)
    sparse = usual.experts(deepseek_router(config), size, shared_size)
    full = Block(norm=norm, attention=latent_attention(config), ffn=usual.gated_ffn())
    delta, conv_size = ChannelDelta(config.integer("linear_head_dim", 128)), config.integer("linear_conv_kernel_dim", 4)
    mixer = KimiDeltaNet(usual.hidden_size, config.integer("linear_num_heads", 32), delta, conv_size, norm)
    has_experts = config.sparse_layers(config.integer("first_k_dense_replace", 1, least=0))
    layers = (
        replace(full, attention=mixer if kind == LINEAR else full.attention, ffn=sparse if is_sparse else full.ffn)
        for kind, is_sparse in zip(_kinds(config), has_experts, strict=True)
    )
    return usual.model(layers, norm)


def _usual_spelling(config: HfConfig) -> HfConfig:
    """Returns the config with the keys of DeepSeek V3, those of `linear_attn_config` included."""
    inner = config.values.get("linear_attn_config") or {}
    if not isinstance(inner, dict) or inner.keys() - _INNER.keys() - set(_LISTS):
        known = ", ".join((*_INNER, *_LISTS))
        raise ValueError(f"config linear_attn_config must be an object of {known}, not {inner!r}")
    values = {SPELLINGS.get(key, key): value for key, value in config.values.items()}
    values |= {_INNER[key]: value for key, value in inner.items() if key in _INNER}
    config = replace(config, values=values)
    return config.with_defaults(q_lora_rank=None, n_routed_experts=256, routed_scaling_factor=2.446)


def _kinds(config: HfConfig) -> list[str]:
    """Returns the kind of each layer, from `layer_types`, or from two lists of layers, which count from 1."""
    num_layers = config.integer("num_hidden_layers")
    if config.values.get("layer_types") is not None:
        return config.layer_types([FULL] * num_layers, (FULL, LINEAR))
    lists = config.values.get("linear_attn_config") or {}
    full, linear = (of if isinstance(of, list) else [of] for of in map(lists.get, _LISTS))
    if not all(isinstance(number, int) for number in (*full, *linear)) or (
        sorted((*full, *linear)) != list(range(1, num_layers + 1))
    ):
        raise ValueError(
            f"config linear_attn_config must list each layer from 1 to {num_layers} once, in {' or '.join(_LISTS)}, "
            f"not {full!r} and {linear!r}"
        )
    return [FULL if number in full else LINEAR for number in range(1, num_layers + 1)]


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, whose experts have the names of Mixtral's."""
    block, decls = spec.layers[layer], declare_layer(spec, layer)
    found = norm_sources(spec, layer, prefix)
    if isinstance(block.attention, LatentAttention):
        found |= latent_attention_sources(spec, layer, prefix)
    else:
        found |= _delta_sources(spec, layer, f"{prefix}self_attn.")
    if not isinstance(block.ffn, ExpertsFfn):
        return found | gated_ffn_sources(spec, layer, prefix)
    start = f"{prefix}block_sparse_moe."
    found |= expert_sources(decls, f"{start}experts.", names=("w1", "w3", "w2"))
    if block.ffn.shared is not None:
        found |= gated_sources(decls, f"{start}shared_experts.", "shared_")
    tensors = {"router": "gate.weight", "router_choice": "gate.e_score_correction_bias"}
    return found | {key: whole(start + name, decls[key].shape) for key, name in tensors.items()}


def _delta_sources(spec: ModelSpec, layer: int, start: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of Kimi delta attention."""
    decls = declare_layer(spec, layer)
    K, D, _ = shape = decls["kda_forget"].shape
    return delta_heads_sources(spec, layer, start) | {
        "kda_latents": tuple(
            Source(f"{start}{letter}_a_proj.weight", (D, spec.hidden_size), (number * D, 0), (D, spec.hidden_size))
            for number, letter in enumerate("fg")
        ),
        "kda_forget": whole(f"{start}f_b_proj.weight", (K * D, D), shape),
        "kda_gate": whole(f"{start}g_b_proj.weight", (K * D, D), shape),
        "kda_decay": whole(f"{start}A_log", (1, 1, K, 1), (K,)),
    }


def delta_heads_sources(spec: ModelSpec, layer: int, start: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of Kimi delta attention but for decays and gates. Each tensor lists all heads."""
    decls, mixer = declare_layer(spec, layer), spec.layers[layer].attention
    assert isinstance(mixer, KimiDeltaNet)
    K, D, E, size = mixer.num_groups, mixer.delta.size, spec.hidden_size, mixer.conv_size
    parts = [(letter, number * D) for number, letter in enumerate("qkv")]
    conv = [rows_of_heads(f"{start}{letter}_conv1d.weight", (K, D, size), first) for letter, first in parts]
    found = with_biases(decls, start, {"kda_out": "o_proj"}) | named_norms(decls, start, {"kda_norm": "o_norm"})
    return found | {
        "kda_in": (
            *(rows_of_heads(f"{start}{letter}_proj.weight", (K, D, E), first) for letter, first in parts),
            rows_of_heads(f"{start}b_proj.weight", (K, 1, E), 3 * D),
        ),
        "kda_conv": tuple(replace(source, shape=(K * D, 1, size)) for source in conv),
        "kda_step_bias": whole(f"{start}dt_bias", (K * D,), (K, D)),
    }


FAMILY = Family(
    "KimiLinearForCausalLM", kimi_linear_spec, layer_sources=sources, understood=("num_experts", "num_local_experts")
)
