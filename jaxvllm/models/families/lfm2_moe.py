"""LFM2 with experts: dense layers first, then layers whose experts are chosen by a sigmoid."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families import lfm2
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, expert_sources, whole


def lfm2_moe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(intermediate_size=7168)
    usual, num_dense = UsualParts(config), config.integer("num_dense_layers", 2, least=0)
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_experts", 32),
        config.integer("num_experts_per_tok", 4),
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob", True),
        added=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
        has_choice_bias=config.flag("use_expert_bias", True),
    )
    sparse = usual.experts(router, config.integer("moe_intermediate_size", 1792))
    dense = GatedFfn(usual.hidden_size, usual.ffn_size)
    if config.values.get("layer_types") is None:
        raise ValueError("config lacks layer_types: config.json must state it")
    kinds = config.layer_types(["conv"] * usual.num_layers, ("full_attention", "conv"))
    return lfm2.hybrid_spec(config, kinds, [dense if n < num_dense else sparse for n in range(usual.num_layers)])


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}feed_forward."
    if "router" not in decls:
        return lfm2.sources(spec, layer, prefix)
    found = lfm2.mixer_sources(spec, layer, prefix) | expert_sources(decls, f"{start}experts.", ("w1", "w3", "w2"))
    names = {"router": "gate.weight", "router_choice": "expert_bias"}
    return found | {key: whole(start + name, decls[key].shape) for key, name in names.items() if key in decls}


FAMILY = replace(
    lfm2.FAMILY,
    architecture="Lfm2MoeForCausalLM",
    spec=lfm2_moe_spec,
    layer_sources=sources,
    understood=("num_experts",),
)
