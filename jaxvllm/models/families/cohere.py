"""Command R (Cohere) and Command R7B and A (Cohere 2): attention and FFN beside each other, after one LayerNorm."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.rope import no_rope
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
    kinds = config.layer_types_by_period(spec.num_layers, config.integer("sliding_window_pattern", 4))
    return with_positions_in_windows(spec, config.windows(kinds, config.optional_integer("sliding_window", 4096)))


def with_positions_in_windows(spec: ModelSpec, windows: tuple[int | None, ...]) -> ModelSpec:
    """Returns the spec with these windows, in which layers that see everything have no positions."""
    [rope] = spec.ropes
    return replace(
        spec,
        windows=windows,
        ropes=(rope, no_rope(rope.rotary_dim)),
        layer_rope=tuple(NO_ROPE if window is None else ROPE for window in windows),
    )


FAMILIES = (Family("CohereForCausalLM", cohere_spec), Family("Cohere2ForCausalLM", cohere2_spec))
