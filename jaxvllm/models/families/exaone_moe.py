"""K-EXAONE: an EXAONE 4 with norms before attention and FFN, and experts as in DeepSeek V3 after the first layers."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.exaone4 import exaone_layers
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def exaone_moe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        num_key_value_heads=32, routed_scaling_factor=2.5, n_routed_experts=config.integer("num_experts", 64)
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    dense = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qk_norm="head"),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    size = config.integer("moe_intermediate_size", 1024)
    experts = usual.experts(deepseek_router(config), size, size * config.integer("num_shared_experts", 1))
    are_sparse = config.sparse_layers(config.integer("first_k_dense_replace", 1, least=0))
    layers = zip(exaone_layers(config, dense), are_sparse, strict=True)
    return usual.model((replace(layer, ffn=experts) if is_sparse else layer for layer, is_sparse in layers), norm)


FAMILY = Family(
    "ExaoneMoeForCausalLM",
    exaone_moe_spec,
    layer_sources=sparse_projections("shared_experts", router_choice="e_score_correction_bias"),
    foreign=("mtp.",),
    understood=("num_experts",),
)
