"""Hunyuan 3: a norm over each query and key head, and experts chosen by a sigmoid with a bias for the choice alone."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def hy_v3_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"mlp_bias": (None, False), "qk_norm": (None, True)})
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=11_158_840.0)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    dense = Block(
        norm=norm,
        attention=usual.head_normed_attention(norm),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_experts", 192),
        config.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        added=1e-20,
        scale=config.number("router_scaling_factor", 2.826),
        has_choice_bias=True,
    )
    size = config.integer("moe_intermediate_size", 1536)
    experts = usual.experts(router, size, size * config.integer("num_shared_experts", 1))
    sparse = replace(dense, ffn=experts)
    are_sparse = config.sparse_layers(config.integer("first_k_dense_replace", 1, least=0))
    return usual.model((sparse if is_sparse else dense for is_sparse in are_sparse), norm)


SOURCES = sparse_projections("shared_mlp", router="router.gate.weight", router_choice="expert_bias")
UNDERSTOOD = ("num_experts", "num_local_experts")
FAMILY = Family("HYV3ForCausalLM", hy_v3_spec, layer_sources=SOURCES, understood=UNDERSTOOD)
