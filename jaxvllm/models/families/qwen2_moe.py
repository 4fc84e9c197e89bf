"""Qwen 1.5 and 2 with experts: a gated expert beside the others, and biases on queries, keys and values."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.qwen3_moe import qwen_router, sparse_layers
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def qwen2_moe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(num_experts=60, num_experts_per_tok=4)
    config.refuse({"use_sliding_window": (None, False)})
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    dense = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=config.flag("qkv_bias", True)),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    sizes = config.integer("moe_intermediate_size", 1408), config.integer("shared_expert_intermediate_size", 5632)
    sparse = replace(dense, ffn=replace(usual.experts(qwen_router(config), *sizes), is_shared_gated=True))
    with_experts = sparse_layers(config)
    return usual.model((sparse if n in with_experts else dense for n in range(usual.num_layers)), norm)


SOURCES = sparse_projections("shared_expert", shared_gate="shared_expert_gate.weight")
FAMILY = Family("Qwen2MoeForCausalLM", qwen2_moe_spec, layer_sources=SOURCES, understood=("num_experts",))
