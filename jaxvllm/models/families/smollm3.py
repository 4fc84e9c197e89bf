"""SmolLM 3: a Llama in which some layers have no positions."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec

ROPE, NO_ROPE = 0, 1


def smollm3_spec(config: HfConfig) -> ModelSpec:
    theta = 2_000_000.0
    spec = llama_spec(config, theta=theta, tied=True, num_kv_heads=4)
    interval = config.integer("no_rope_layer_interval", 4)
    # The key's name says the opposite of its values: 1 means a layer with RoPE.
    rotated = config.values.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(spec.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < spec.num_layers or not all(value in (0, 1) for value in rotated):
        raise ValueError(f"config no_rope_layers must be {spec.num_layers} of 0 and 1, not {rotated!r}")
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    kinds = ["full_attention" if rope else "sliding_attention" for rope in rotated[: spec.num_layers]]
    return replace(
        spec,
        windows=config.windows(config.layer_types(kinds) if window else kinds, window),
        ropes=config.ropes(theta, spec.head_size, config.integer("max_position_embeddings")),
        layer_rope=tuple(ROPE if rope else NO_ROPE for rope in rotated[: spec.num_layers]),
    )


FAMILY = Family("SmolLM3ForCausalLM", smollm3_spec)
