"""ERNIE 4.5, dense: a Llama whose rope turns neighbours, with biases where the config says so."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def ernie4_5_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        head_dim=128, num_key_value_heads=2, rope_theta=500_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps"))
    has_bias = config.flag("use_bias", False)
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), rope_pairs="neighbours", qkv_bias=has_bias, o_bias=has_bias),
        ffn=replace(usual.gated_ffn(), bias=has_bias),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("Ernie4_5ForCausalLM", ernie4_5_spec)
