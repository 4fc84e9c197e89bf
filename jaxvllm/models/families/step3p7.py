"""Step 3.7, text only, inside the multimodal checkpoint: a gate for each query head, and experts with bounded gates.

Layers with a window have another number of query heads, and each kind of layer has its own rope.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.forms.form import BoundedSwiglu, Gating
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    attention_sources,
    gated_ffn_sources,
    gated_sources,
    norm_sources,
    whole,
)

_SLIDING = "sliding_attention"
# What published configs call the keys that transformers has.
_SPELLINGS = {
    "num_attention_groups": "num_key_value_heads",
    "num_local_experts": "n_routed_experts",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
# Lists that have an entry for each layer, and may go on with those of layers that predict further tokens.
_LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")


def step3p7_spec(config: HfConfig) -> ModelSpec:
    config.refuse(
        {"gating": (None, True, "per-head"), "hidden_act": (None, "silu", "swigluoai"), "mlp_bias": (None, False)}
    )
    config = _usual_spelling(config)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5), offset=1.0)
    attention = replace(
        usual.head_normed_attention(norm),
        scale=config.number("query_pre_attn_scalar", usual.head_size) ** -0.5,
        head_gating="sigmoid",
    )
    num_heads = {_SLIDING: config.integer("num_sliding_attention_heads", attention.num_heads)}
    kinds = config.layer_types(["full_attention"] * usual.num_layers)
    windows = config.windows(kinds, config.optional_integer("sliding_window"))
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("n_routed_experts", 288),
        config.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        scale=config.number("moe_router_scaling_factor", 1.0),
        has_choice_bias=True,
    )
    no_limits = [0.0] * usual.num_layers
    limits, shared_limits = (config.of_layers(key, no_limits) for key in ("swiglu_limits", "swiglu_limits_shared"))
    sizes = config.integer("moe_intermediate_size", 1280), config.integer("share_expert_dim", 1280)

    def layer(number: int, is_sparse: bool) -> Block:
        kind, bounded = kinds[number], _gating(shared_limits[number])
        ffn: GatedFfn | ExpertsFfn = GatedFfn(usual.hidden_size, usual.ffn_size, bounded)
        if is_sparse:
            shared = GatedFfn(usual.hidden_size, sizes[1], bounded)
            ffn = ExpertsFfn(usual.hidden_size, sizes[0], router, _gating(limits[number]), shared)
        entry = config.rope_parameters().get(kind) or {}
        return Block(
            norm=norm,
            attention=replace(attention, num_heads=num_heads.get(kind, attention.num_heads)),
            ffn=ffn,
            rope=config.rope(entry, 10_000.0, usual.head_size, usual.max_position),
            window=windows[number],
        )

    layers = map(layer, range(usual.num_layers), config.sparse_layers(first=3))
    return replace(usual.model(layers, norm), max_position=usual.max_position)


def _gating(limit: float) -> Gating:
    return BoundedSwiglu(limit) if limit else "silu"


def _usual_spelling(config: HfConfig) -> HfConfig:
    """Returns the config with the keys of transformers, where a published one has other keys."""
    values: dict[str, Any] = {_SPELLINGS.get(key, key): value for key, value in config.values.items()}
    config = replace(config, values=values)
    num_layers = config.integer("num_hidden_layers", 45)
    own = {key: values[key][:num_layers] for key in _LISTS if isinstance(values.get(key), list)}
    other = config.nested("attention_other_setting")
    if other.values:
        own.setdefault("num_sliding_attention_heads", other.values.get("num_attention_heads"))
    if values.get("moe_layers_enum") is not None:
        own["mlp_layer_types"] = mlp_layer_types(values["moe_layers_enum"], num_layers)
    kinds = replace(config, values=values | own).layer_types(["full_attention"] * num_layers)
    own["rope_parameters"] = _rope_entries(config, kinds)
    return replace(config, values=values | own | {"num_hidden_layers": num_layers}).with_defaults(
        hidden_size=4096,
        intermediate_size=11_264,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=128_000,
        vocab_size=128_815,
    )


def mlp_layer_types(sparse: Any, num_layers: int) -> list[str]:
    """Returns whether each layer is sparse, for a list of the numbers of those that are, or a text of this list."""
    numbers = {number.strip() for number in str(sparse).strip("[]").split(",")}
    return ["sparse" if str(number) in numbers else "dense" for number in range(num_layers)]


def _rope_entries(config: HfConfig, kinds: list[str]) -> dict[str, Any]:
    """Returns the rope parameters of each kind of layer: those of its first layer, where lists have each layer's."""
    parameters = config.rope_parameters()
    if all(isinstance(parameters.get(kind), dict) for kind in kinds):
        return parameters
    if any(kind in parameters for kind in kinds):
        raise ValueError(f"config rope_parameters must hold an object for each of {' and '.join(sorted(set(kinds)))}")
    bases, parts = (config.values.get(key) for key in ("rope_theta", "partial_rotary_factors"))
    entries: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        base, part = (of[number] if isinstance(of, list) and number < len(of) else of for of in (bases, parts))
        own = {"rope_theta": base, "partial_rotary_factor": part}
        scaling = parameters if kind == "full_attention" else {}
        entries.setdefault(kind, scaling | {key: value for key, value in own.items() if value is not None})
    return entries


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    K, G, E = gates = decls["head_gates"].shape
    found["head_gates"] = whole(f"{prefix}self_attn.g_proj.weight", (K * G, E), gates)
    return found | ffn_sources(spec, layer, prefix)


def ffn_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the FFN or the experts of a layer."""
    decls = declare_layer(spec, layer)
    if "router" not in decls:
        return gated_ffn_sources(spec, layer, prefix)
    X, _, F, E = decls["experts_gate_up"].shape
    experts = tuple(
        Source(f"{prefix}moe.{name}.weight", (X, F, E), (0, half, 0, 0), (X, 1, F, E))
        for half, name in enumerate(("gate_proj", "up_proj"))
    )
    found = {"experts_gate_up": experts} | gated_sources(decls, f"{prefix}share_expert.", "shared_")
    tensors = {"experts_down": "down_proj.weight", "router": "gate.weight", "router_choice": "router_bias"}
    return found | {
        key: whole(f"{prefix}moe.{name}", decls[key].shape) for key, name in tensors.items() if key in decls
    }


FAMILY = Family(
    "Step3p7ForConditionalGeneration",
    step3p7_spec,
    layer_sources=sources,
    prefixes=("model.", "model.language_model."),
    foreign=("vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector."),
    understood=("num_local_experts",),
    nested_in="text_config",
)
