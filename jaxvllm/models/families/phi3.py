"""Phi-3 and Phi-4 mini: a Llama with fused projections, LongRoPE and, in some sizes, a window."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import fused_projections


def phi3_spec(config: HfConfig) -> ModelSpec:
    parameters = config.rope_parameters()
    # Early configs say yarn although they mean LongRoPE.
    if parameters.get("rope_type", parameters.get("type")) == "yarn":
        parameters["rope_type"] = "longrope"
    values = dict(config.values) | {"rope_parameters": parameters, "rope_scaling": None}
    meant = replace(config, values=values).with_defaults(original_max_position_embeddings=4096, rms_norm_eps=1e-5)
    spec, window = llama_spec(meant), config.optional_integer("sliding_window")
    return replace(spec, layers=spec.layers[0].in_windows([window] * spec.num_layers))


FAMILY = Family("Phi3ForCausalLM", phi3_spec, layer_sources=fused_projections)
