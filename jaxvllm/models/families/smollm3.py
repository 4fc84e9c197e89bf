"""SmolLM 3: a Llama in which some layers have no positions."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.rope import no_rope
from jaxvllm.models.spec import ModelSpec


def smollm3_spec(config: HfConfig) -> ModelSpec:
    spec = llama_spec(config.with_defaults(rope_theta=2_000_000.0, tie_word_embeddings=True, num_key_value_heads=4))
    interval = config.integer("no_rope_layer_interval", 4)
    # The key's name says the opposite of its values: 1 means a layer with RoPE.
    rotated = config.values.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(spec.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < spec.num_layers or not all(value in (0, 1) for value in rotated):
        raise ValueError(f"config no_rope_layers must be {spec.num_layers} of 0 and 1, not {rotated!r}")
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    kinds = ["full_attention" if rope else "sliding_attention" for rope in rotated[: spec.num_layers]]
    windows = config.windows(config.layer_types(kinds) if window else kinds, window)
    layers = zip(spec.layers[0].in_windows(windows), rotated, strict=False)
    unturned = no_rope(spec.layers[0].rope)
    return replace(spec, layers=tuple(layer if rope else replace(layer, rope=unturned) for layer, rope in layers))


FAMILY = Family("SmolLM3ForCausalLM", smollm3_spec)
