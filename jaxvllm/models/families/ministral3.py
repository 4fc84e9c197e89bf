"""Ministral 3: a Mistral with YaRN, whose queries grow with their position. Mistral 3 has one inside."""

from dataclasses import replace

from jaxvllm.models.attention import QueryGrowth
from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.mistral import mistral_spec
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def ministral3_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=1_000_000.0))
    norm, has_bias = RmsNorm(config.number("rms_norm_eps", 1e-5)), usual.attention_bias
    attention = replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias, q_growth=_growth(config))
    layer = Block(
        norm=norm,
        attention=attention,
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
        window=config.optional_integer("sliding_window"),
    )
    return usual.model([layer] * usual.num_layers, norm)


def _growth(config: HfConfig) -> QueryGrowth | None:
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


def mistral3_spec(config: HfConfig) -> ModelSpec:
    """Returns the spec of the decoder in a multimodal checkpoint, which is a Mistral in Mistral Small 3.1."""
    return mistral_spec(config) if config.values.get("model_type") == "mistral" else ministral3_spec(config)


FAMILIES = (
    Family("Ministral3ForCausalLM", ministral3_spec),
    beside_vision("Mistral3ForConditionalGeneration", mistral3_spec),
)
