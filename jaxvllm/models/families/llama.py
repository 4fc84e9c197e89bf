"""Llama 2, 3, 3.1, and models that share their architecture. Families that differ in few things start from it."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def llama_spec(config: HfConfig) -> ModelSpec:
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=usual.attention_bias, o_bias=usual.attention_bias),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("LlamaForCausalLM", llama_spec)
