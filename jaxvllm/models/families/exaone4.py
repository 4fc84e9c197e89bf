"""EXAONE 4: norms after attention and FFN, a norm over each query and key head, and no positions in full layers."""

from dataclasses import replace

from jaxvllm.models.families.cohere import with_positions_in_windows
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def exaone4_spec(config: HfConfig) -> ModelSpec:
    spec = replace(llama_spec(config, eps=1e-5), placement="post", qk_norm="head")
    window = config.optional_integer("sliding_window", 4096)
    if window is None:  # as in the model of 1.2B, all of whose layers have positions
        return spec
    period = 4
    if config.values.get("layer_types") is None:  # otherwise the pattern may be a text, such as LLLG
        period = config.integer("sliding_window_pattern", 4)
    kinds = config.layer_types_by_period(spec.num_layers, period)
    return with_positions_in_windows(spec, config.windows(kinds, window))


FAMILY = Family("Exaone4ForCausalLM", exaone4_spec)
