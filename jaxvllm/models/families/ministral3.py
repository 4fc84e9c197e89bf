"""Ministral 3: a Mistral with YaRN, whose queries grow with their position."""

from dataclasses import replace

from jaxvllm.models.attention import QueryGrowth
from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def ministral3_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=1_000_000.0))
    norm, has_bias = RmsNorm(config.number("rms_norm_eps", 1e-5)), usual.attention_bias
    attention = replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias, q_growth=query_growth(config))
    layer = Block(
        norm=norm,
        attention=attention,
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
        window=config.optional_integer("sliding_window"),
    )
    return usual.model([layer] * usual.num_layers, norm)


def query_growth(config: HfConfig) -> QueryGrowth | None:
    """Returns how queries grow with their position, which rope parameters say, or None where they do not."""
    parameters = config.rope_parameters()
    beta, period = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    if not beta:
        return None
    if not isinstance(beta, int | float) or not isinstance(period, int) or beta < 0 or period < 1:
        raise ValueError(
            f"config rope_parameters llama_4_scaling_beta = {beta!r} must be positive, and needs "
            f"original_max_position_embeddings, not {period!r}"
        )
    return QueryGrowth(float(beta), period)


FAMILY = Family("Ministral3ForCausalLM", ministral3_spec)
