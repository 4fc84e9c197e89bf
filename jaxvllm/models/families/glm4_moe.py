"""GLM-4.5 to 4.7: dense layers first, then experts, chosen by a sigmoid with a bias for the choice alone."""

from dataclasses import replace

from jaxvllm.models.attention import QkNorm
from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertGroups, ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def glm4_moe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(num_key_value_heads=8, partial_rotary_factor=0.5)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    qk_norm: QkNorm = "head" if config.flag("use_qk_norm", False) else "none"
    dense = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qk_norm=qk_norm, qkv_bias=usual.attention_bias),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    size = config.integer("moe_intermediate_size", 1408)
    sparse = replace(
        dense, ffn=usual.experts(deepseek_router(config), size, size * config.integer("n_shared_experts", 1))
    )
    first = config.integer("first_k_dense_replace", 1, least=0)
    return usual.model((dense if number < first else sparse for number in range(usual.num_layers)), norm)


def deepseek_router(config: HfConfig) -> ExpertRouter:
    """Returns the router of DeepSeek V3, which chooses among groups of experts where there are several."""
    groups, kept = config.integer("n_group", 1), config.integer("topk_group", 1)
    return ExpertRouter(
        config.integer("hidden_size"),
        config.integer("n_routed_experts", 128),
        config.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob", True),
        added=1e-20,
        scale=config.number("routed_scaling_factor", 1.0),
        has_choice_bias=True,
        groups=ExpertGroups(groups, kept) if groups > 1 else None,
    )


SOURCES = sparse_projections("shared_experts", router_choice="gate.e_score_correction_bias")
FAMILY = Family("Glm4MoeForCausalLM", glm4_moe_spec, layer_sources=SOURCES, understood=("use_qk_norm",))
