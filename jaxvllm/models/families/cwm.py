"""Code World Model: a Llama with a window in three of four layers, of which the first sees everything."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec

# The scaling of a config that has none.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def cwm_spec(config: HfConfig) -> ModelSpec:
    config = config.or_rope(_ROPE).with_defaults(
        head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0
    )
    config.refuse({"attention_bias": (None, False)})
    spec = llama_spec(config)
    kinds = ["sliding_attention" if number % 4 else "full_attention" for number in range(spec.num_layers)]
    windows = config.windows(config.layer_types(kinds), config.optional_integer("sliding_window", 8192))
    return replace(spec, layers=spec.layers[0].in_windows(windows))


FAMILY = Family("CwmForCausalLM", cwm_spec)
