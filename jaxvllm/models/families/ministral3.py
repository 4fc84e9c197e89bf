"""Ministral 3: a Mistral with YaRN, whose queries grow with their position. Mistral 3 has one inside."""

from dataclasses import replace

from jaxvllm.models.attention import QueryGrowth
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.families.mistral import mistral_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def ministral3_spec(config: HfConfig) -> ModelSpec:
    values = {"head_dim": 128} | dict(config.values)
    spec = llama_spec(replace(config, values=values), theta=1_000_000.0, eps=1e-5, num_kv_heads=8)
    parameters = config.rope_parameters()
    beta, period = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    growth = None
    if beta:
        if not isinstance(beta, int | float) or not isinstance(period, int) or beta < 0 or period < 1:
            raise ValueError(
                f"config rope_parameters llama_4_scaling_beta = {beta!r} must be positive, and needs "
                f"original_max_position_embeddings, not {period!r}"
            )
        growth = QueryGrowth(float(beta), period)
    window = config.optional_integer("sliding_window")
    return replace(spec, windows=(window,) * spec.num_layers, q_growth=growth)


def mistral3_spec(config: HfConfig) -> ModelSpec:
    """Returns the spec of the decoder in a multimodal checkpoint, which is a Mistral in Mistral Small 3.1."""
    return mistral_spec(config) if config.values.get("model_type") == "mistral" else ministral3_spec(config)


FAMILIES = (
    Family("Ministral3ForCausalLM", ministral3_spec),
    beside_vision("Mistral3ForConditionalGeneration", mistral3_spec),
)
