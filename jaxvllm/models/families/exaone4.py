"""EXAONE 4: norms after attention and FFN, a norm over each query and key head, and no positions in full layers."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec

ROPE, NO_ROPE = 0, 1


def exaone4_spec(config: HfConfig) -> ModelSpec:
    spec = replace(llama_spec(config, eps=1e-5), placement="post", qk_norm="head")
    window = config.optional_integer("sliding_window", 4096)
    if window is None:  # as in the model of 1.2B, all of whose layers have positions
        return spec
    period = 4
    if config.values.get("layer_types") is None:  # otherwise the pattern may be a text, such as LLLG
        period = config.integer("sliding_window_pattern", 4)
    kinds = config.layer_types(
        ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(spec.num_layers)]
    )
    [rope] = spec.ropes
    return replace(
        spec,
        windows=config.windows(kinds, window),
        ropes=(rope, rope.still()),
        layer_rope=tuple(ROPE if kind == "sliding_attention" else NO_ROPE for kind in kinds),
    )


FAMILY = Family("Exaone4ForCausalLM", exaone4_spec)
