"""Mistral Small 4: latent attention whose queries grow with their position, and experts in groups."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertGroups, ExpertRouter
from jaxvllm.models.families.deepseek_v2 import latent_attention_sources, latent_model
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.ministral3 import query_growth
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    gated_ffn_sources,
    gated_sources,
    norm_sources,
    stacked_expert_sources,
    whole,
)

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4_spec(config: HfConfig) -> ModelSpec:
    config = _without_rotary_part(
        config.or_rope(_YARN).with_defaults(
            q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, n_routed_experts=128, num_experts_per_tok=4,
            moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=0,
        )
    )  # fmt: skip
    groups, kept = config.optional_integer("n_group") or 1, config.optional_integer("topk_group") or 1
    router = ExpertRouter(
        config.integer("hidden_size"),
        config.integer("n_routed_experts"),
        config.integer("num_experts_per_tok"),
        is_normalized=config.flag("norm_topk_prob", True),
        added=1e-20,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=ExpertGroups(groups, kept) if groups > 1 else None,
    )
    spec, growth = latent_model(config, router), query_growth(config)

    def growing(layer: Block) -> Block:
        assert isinstance(layer.attention, LatentAttention)
        return replace(layer, attention=replace(layer.attention, q_growth=growth))

    return replace(spec, layers=tuple(map(growing, spec.layers)))


def _without_rotary_part(config: HfConfig) -> HfConfig:
    """Returns the config without the part of a head that turns, which is what its sizes say."""
    parameters = config.rope_parameters()
    content, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim", 64)
    part = parameters.pop("partial_rotary_factor", rope / (content + rope))
    if not isinstance(part, int | float) or int((content + rope) * part) != rope:
        raise ValueError(
            f"config partial_rotary_factor {part!r} must be that of qk_rope_head_dim {rope} of {content + rope}"
        )
    others = {
        key: value for key, value in config.values.items() if key not in ("rope_scaling", "partial_rotary_factor")
    }
    return replace(config, values=others | {"rope_parameters": parameters})


def sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer. One tensor has all experts."""
    decls, start = declare_layer(spec, layer), f"{prefix}mlp."
    found = norm_sources(spec, layer, prefix) | latent_attention_sources(spec, layer, prefix)
    if "router" not in decls:
        return found | gated_ffn_sources(spec, layer, prefix)
    found |= stacked_expert_sources(decls, f"{start}experts.gate_up_proj", f"{start}experts.down_proj")
    if "shared_gate_up" in decls:
        found |= gated_sources(decls, f"{start}shared_experts.", "shared_")
    return found | {"router": whole(f"{start}gate.weight", decls["router"].shape)}


FAMILY = Family("Mistral4ForCausalLM", mistral4_spec, layer_sources=sources)
