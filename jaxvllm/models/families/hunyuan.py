"""Hunyuan, dense and with experts: norms of queries and keys after their rope, whose base a fixed factor stretches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    attention_sources,
    expert_sources,
    gated_ffn_sources,
    gated_sources,
    named_norms,
    norm_sources,
    whole,
)


def hunyuan_dense_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"use_qk_norm": (None, True), "use_cla": (None, False)})
    config = _with_plain_rope(config)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    has_bias = usual.attention_bias
    layer = Block(
        norm=norm,
        attention=replace(
            usual.attention(norm), qk_norm="head", is_normed_late=True, qkv_bias=has_bias, o_bias=has_bias
        ),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def hunyuan_moe_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"norm_topk_prob": (None, True), "moe_layer_num_skipped": (None, 0)})
    spec, usual = hunyuan_dense_spec(config), UsualParts(config)
    of_layers = [
        {key: _of_layer(config, key, number) for key in ("moe_topk", "moe_intermediate_size", "num_shared_expert")}
        for number in range(usual.num_layers)
    ]
    layers = []
    for layer, values in zip(spec.layers, of_layers, strict=True):
        own = replace(config, values=dict(config.values) | values)
        router = ExpertRouter(usual.hidden_size, own.integer("num_experts", 1), own.integer("moe_topk", 1))
        shared_size = usual.ffn_size * own.integer("num_shared_expert", 1, least=0)
        size = own.integer("moe_intermediate_size", usual.ffn_size)
        layers.append(replace(layer, ffn=usual.experts(router, size, shared_size)))
    return replace(spec, layers=tuple(layers))


def _of_layer(config: HfConfig, key: str, number: int) -> Any:
    """Returns the value of a key for a layer. Configs have a list of values, or one for all layers."""
    value = config.values.get(key)
    if not isinstance(value, list):
        return value
    if len(value) != config.integer("num_hidden_layers"):
        raise ValueError(f"config {key} must have a value for each layer, not {value!r}")
    return value[number]


def _with_plain_rope(config: HfConfig) -> HfConfig:
    """Returns the config with the base of its rope stretched by `alpha` (NTK), which configs call dynamic."""
    parameters = config.rope_parameters()
    if parameters.get("rope_type", parameters.get("type")) != "dynamic" or not parameters.get("alpha"):
        return config
    dim = UsualParts(config).head_size
    values = replace(config, values=parameters)
    theta = values.number("rope_theta", config.number("rope_theta", 10_000.0))
    if dim <= 2:
        raise ValueError(f"config head_dim must be above 2 for a rope with alpha, not {dim}")
    base = theta * values.number("alpha") ** (dim / (dim - 2))
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": base}, "rope_scaling": None}
    return replace(config, values=dict(config.values) | plain)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}mlp."
    names = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    found = norm_sources(spec, layer, prefix) | named_norms(decls, prefix, names)
    found |= attention_sources(spec, layer, prefix)
    if "router" not in decls:
        return found | gated_ffn_sources(spec, layer, prefix)
    found |= expert_sources(decls, f"{start}experts.") | {
        "router": whole(f"{start}gate.wg.weight", decls["router"].shape)
    }
    return found | gated_sources(decls, f"{start}shared_mlp.", "shared_") if "shared_gate_up" in decls else found


FAMILIES = (
    Family("HunYuanDenseV1ForCausalLM", hunyuan_dense_spec, layer_sources=sources, understood=("use_qk_norm",)),
    Family(
        "HunYuanMoEV1ForCausalLM",
        hunyuan_moe_spec,
        layer_sources=sources,
        understood=("use_qk_norm", "num_experts", "num_local_experts"),
    ),
)
