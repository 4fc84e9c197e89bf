"""Ling 3: Kimi delta attention whose memory forgets within bounds, and latent attention with a gate for each head."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.deepseek_v2 import latent_attention, latent_attention_sources
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.families.kimi_linear import FULL, LINEAR, SPELLINGS, delta_heads_sources
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.kimi_delta import ChannelDelta, KimiDeltaNet
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    OuterNames,
    Source,
    expert_sources,
    gated_ffn_sources,
    gated_sources,
    norm_sources,
    whole,
    with_biases,
)


def bailing_hybrid_spec(config: HfConfig) -> ModelSpec:
    # The convolution of linear attention has the activation of the FFNs, and ours knows one.
    config.refuse({"hidden_act": (None, "silu"), "q_lora_rank": (None,), "score_function": (None, "sigmoid")})
    config = replace(config, values={SPELLINGS.get(key, key): value for key, value in config.values.items()})
    config = replace(config, values=dict(config.values) | {"q_lora_rank": None}).with_defaults(
        n_routed_experts=512,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        rope_theta=6_000_000.0,
        max_position_embeddings=262_144,
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    size = config.integer("moe_intermediate_size", 768)
    sparse = usual.experts(deepseek_router(config), size, size * config.integer("n_shared_experts", 1))
    attention = replace(latent_attention(config), has_head_gates=True)
    rope = config.rope(config.rope_parameters(), config.number("rope_theta"), attention.rope_size, usual.max_position)
    full = Block(norm=norm, attention=attention, ffn=usual.gated_ffn(), rope=rope)
    # transformers writes the size of ropes for `head_dim`, and beside it that of linear attention.
    delta_size = config.integer("linear_head_dim", config.integer("head_dim", 128))
    mixer = KimiDeltaNet(
        usual.hidden_size,
        config.integer("num_attention_heads"),
        ChannelDelta(delta_size),
        config.integer("short_conv_kernel_size", 4),
        norm,
        has_latents=False,
        most_forgotten=-_bound(config) if config.flag("kda_safe_gate", True) else None,
    )
    linear = replace(full, attention=mixer, rope=None)
    period = config.integer("layer_group_size", 6)
    kinds = config.layer_types(
        [LINEAR if (number + 1) % period else FULL for number in range(usual.num_layers)], (FULL, LINEAR)
    )
    has_experts = config.sparse_layers(config.integer("first_k_dense_replace", 2, least=0))
    layers = (
        replace(linear if kind == LINEAR else full, ffn=sparse if is_sparse else full.ffn)
        for kind, is_sparse in zip(kinds, has_experts, strict=True)
    )
    return usual.model(layers, norm)


def _bound(config: HfConfig) -> float:
    """Returns the least logarithm of what a token leaves of the memory."""
    bound = config.values.get("kda_lower_bound", -5.0)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not bound < 0:
        raise ValueError(f"config kda_lower_bound must be a number below 0, not {bound!r}")
    return float(bound)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    block, decls, start = spec.layers[layer], declare_layer(spec, layer), f"{prefix}attention."
    found = norm_sources(spec, layer, prefix)
    if isinstance(block.attention, LatentAttention):
        found |= latent_attention_sources(spec, layer, prefix, inputs="attention.", output="dense")
        K, G, E = gates = decls["head_gates"].shape
        found["head_gates"] = whole(f"{start}g_proj.weight", (K * G, E), gates)
    else:
        found |= delta_heads_sources(spec, layer, start) | with_biases(decls, start, {"kda_out": "dense"})
        for key, name in (("kda_forget", "f_proj"), ("kda_gate", "g_proj")):
            K, D, E = shape = decls[key].shape
            found[key] = whole(f"{start}{name}.weight", (K * D, E), shape)
        found["kda_decay"] = whole(f"{start}A_log", decls["kda_decay"].shape)
    if "router" not in decls:
        return found | gated_ffn_sources(spec, layer, prefix)
    found |= expert_sources(decls, f"{prefix}mlp.experts.")
    found |= gated_sources(decls, f"{prefix}mlp.shared_experts.", "shared_")
    tensors = {"router": "gate.weight", "router_choice": "gate.expert_bias"}
    return found | {key: whole(f"{prefix}mlp.{name}", decls[key].shape) for key, name in tensors.items()}


FAMILY = Family(
    "BailingHybridForCausalLM",
    bailing_hybrid_spec,
    layer_sources=sources,
    names=OuterNames(embed="word_embeddings.weight"),
    understood=("num_experts", "num_local_experts"),
)
