"""OLMo 3: an OLMo 2 with three windowed layers to a full one, of which only the full one has a scaled rope."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.olmo2 import olmo_layer
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def olmo3_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(max_position_embeddings=2048, rope_theta=500_000.0)
    of_full, of_sliding = rope_entries(config)
    # The scaling of the whole config is that of the layers of full attention.
    usual = UsualParts(replace(config, values=dict(config.values) | {"rope_parameters": of_full, "rope_scaling": None}))
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5))
    full = olmo_layer(usual, norm)
    sliding = replace(
        full,
        rope=config.rope(of_sliding, config.number("rope_theta"), usual.head_size, usual.max_position),
        window=config.optional_integer("sliding_window", 4096),
    )
    kinds = config.layer_types_by_period(usual.num_layers, 4)
    return usual.model((sliding if kind == "sliding_attention" else full for kind in kinds), norm)


FAMILY = Family("Olmo3ForCausalLM", olmo3_spec)
