"""Mellum 2: a Qwen 3 with experts, whose windowed layers have a rope of their own."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.qwen3_moe import qwen_router
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def mellum_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=128, num_key_value_heads=4, norm_topk_prob=True)
    config = config.with_defaults(num_experts=config.integer("num_local_experts", 64))
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    of_full, of_sliding = rope_entries(config)
    sizes = usual.head_size, usual.max_position
    full = Block(
        norm=norm,
        attention=usual.head_normed_attention(norm),
        ffn=usual.gated_ffn(),
        rope=config.rope(of_full, 500_000.0, *sizes),
    )
    sliding = replace(
        full, rope=config.rope(of_sliding, 10_000.0, *sizes), window=config.optional_integer("sliding_window", 1024)
    )
    experts = usual.experts(qwen_router(config), config.integer("moe_intermediate_size", 896))
    kinds = zip(config.layer_types(["full_attention"] * usual.num_layers), config.sparse_layers(first=0), strict=True)
    layers = ((sliding if kind == "sliding_attention" else full, is_sparse) for kind, is_sparse in kinds)
    spec = usual.model((replace(layer, ffn=experts) if is_sparse else layer for layer, is_sparse in layers), norm)
    return replace(spec, max_position=usual.max_position)


FAMILY = Family(
    "MellumForCausalLM",
    mellum_spec,
    layer_sources=sparse_projections(),
    foreign=("mtp.",),
    understood=("num_experts", "num_local_experts"),
)
