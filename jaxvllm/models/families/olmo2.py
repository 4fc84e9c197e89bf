"""OLMo 2: norms after attention and FFN, one norm over all query heads, and one over all key heads."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def olmo2_spec(config: HfConfig) -> ModelSpec:
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    layer = olmo_layer(usual, norm)
    return usual.model([layer] * usual.num_layers, norm)


def olmo_layer(usual: UsualParts, norm: RmsNorm) -> Block:
    """Returns a layer of OLMo 2."""
    has_bias = usual.attention_bias
    return Block(
        norm=norm,
        placement="post",
        attention=replace(usual.attention(norm), qk_norm="full", qkv_bias=has_bias, o_bias=has_bias),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )


FAMILY = Family("Olmo2ForCausalLM", olmo2_spec)
