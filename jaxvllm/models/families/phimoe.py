"""Phi 3.5 MoE: LayerNorm, biases on attention and LM head, LongRoPE, and experts chosen one after the other."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter, SparseMixer
from jaxvllm.models.families import mixtral
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.spec import ModelSpec


def phimoe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(num_key_value_heads=8, rope_theta=1_000_000.0)
    usual, norm = UsualParts(config), LayerNorm(config.number("rms_norm_eps", 1e-5))
    # Two are chosen, whatever num_experts_per_tok says.
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_local_experts", 16),
        2,
        scoring=SparseMixer(2 * config.number("router_jitter_noise", 0.01)),
    )
    config.refuse({"num_experts_per_tok": (None, router.top_k)})
    has_bias = usual.attention_bias
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias),
        ffn=usual.experts(router, usual.ffn_size),
        rope=usual.rope(),
        window=config.optional_integer("sliding_window"),
    )
    spec = usual.model([layer] * usual.num_layers, norm)
    return replace(spec, head_bias=config.flag("lm_head_bias", False))


# Released configs and transformers write the name in two ways.
FAMILIES = tuple(
    Family(name, phimoe_spec, layer_sources=mixtral.sources, understood=("num_local_experts",))
    for name in ("PhiMoEForCausalLM", "PhimoeForCausalLM")
)
