"""Command R (Cohere) and Command R7B and A (Cohere 2): attention and FFN beside each other, after one LayerNorm."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.spec import ModelSpec

ROPE, NO_ROPE = 0, 1


def cohere_spec(config: HfConfig) -> ModelSpec:
    """Returns the spec of the first Command R, without the norms of queries and keys that Command R+ has."""
    # No Cohere has a head_dim of its own, although transformers writes one.
    values = {key: value for key, value in config.values.items() if key != "head_dim"}
    values = {"max_position_embeddings": 8192} | values
    return replace(
        llama_spec(replace(config, values=values), tied=True),
        norm=LayerNorm(config.number("layer_norm_eps", 1e-5), bias=False),
        placement="parallel",
        rope_pairs="neighbours",
        logit_scale=config.number("logit_scale", 0.0625),
    )


def cohere2_spec(config: HfConfig) -> ModelSpec:
    spec = cohere_spec(config)
    period = config.integer("sliding_window_pattern", 4)
    kinds = config.layer_types(
        ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(spec.num_layers)]
    )
    [rope] = spec.ropes
    return replace(
        spec,
        windows=config.windows(kinds, config.optional_integer("sliding_window", 4096)),
        # Only layers with a window have positions.
        ropes=(rope, rope.still()),
        layer_rope=tuple(ROPE if kind == "sliding_attention" else NO_ROPE for kind in kinds),
    )


FAMILIES = (Family("CohereForCausalLM", cohere_spec), Family("Cohere2ForCausalLM", cohere2_spec))
