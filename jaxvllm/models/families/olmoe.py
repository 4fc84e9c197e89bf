"""OLMoE: one norm over all query heads and one over all key heads, and experts that count as the softmax says."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def olmoe_spec(config: HfConfig) -> ModelSpec:
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    has_bias = usual.attention_bias
    num_experts, top_k = config.integer("num_experts", 64), config.integer("num_experts_per_tok", 8)
    router = ExpertRouter(usual.hidden_size, num_experts, top_k, is_normalized=config.flag("norm_topk_prob", False))
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qk_norm="full", qkv_bias=has_bias, o_bias=has_bias),
        ffn=usual.experts(router, usual.ffn_size),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("OlmoeForCausalLM", olmoe_spec, layer_sources=sparse_projections(), understood=("num_experts",))
