"""Solar Open: the attention of a Llama, and experts in every layer as in GLM-4.5."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import SOURCES, deepseek_router
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def solar_open_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=1_000_000.0)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    size = config.integer("moe_intermediate_size", 1280)
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=usual.attention_bias),
        ffn=usual.experts(deepseek_router(config), size, size * config.integer("n_shared_experts", 1)),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("SolarOpenForCausalLM", solar_open_spec, layer_sources=SOURCES)
