"""OLMo 3: an OLMo 2 with three windowed layers to a full one, of which only the full one has a scaled rope."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.olmo2 import olmo2_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def olmo3_spec(config: HfConfig) -> ModelSpec:
    full, sliding = rope_entries(config)
    max_position, theta = config.integer("max_position_embeddings", 2048), config.number("rope_theta", 500_000.0)
    # The scaling of the whole config is that of the layers of full attention.
    plain = replace(config, values=dict(config.values) | {"rope_parameters": full, "rope_scaling": None})
    spec = olmo2_spec(plain)
    kinds = config.layer_types_by_period(spec.num_layers, 4)
    return replace(
        spec,
        windows=config.windows(kinds, config.optional_integer("sliding_window", 4096)),
        ropes=tuple(config.rope(entry, theta, spec.head_size, max_position) for entry in (full, sliding)),
        layer_rope=tuple(int(kind == "sliding_attention") for kind in kinds),
    )


FAMILY = Family("Olmo3ForCausalLM", olmo3_spec)
