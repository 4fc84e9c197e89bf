"""Mistral 3: a multimodal checkpoint with a Mistral, a Ministral 3 or a Mistral 4 inside, as its `model_type` says."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.families import mistral4
from jaxvllm.models.families.family import beside_vision
from jaxvllm.models.families.ministral3 import ministral3_spec
from jaxvllm.models.families.mistral import mistral_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, separate_projections


def mistral3_spec(config: HfConfig) -> ModelSpec:
    """Returns the spec of the decoder, which is a Mistral in Mistral Small 3.1, and a Mistral 4 in Mistral Small 4."""
    specs = {"mistral": mistral_spec, "mistral4": mistral4.mistral4_spec}
    return specs.get(str(config.values.get("model_type")), ministral3_spec)(config)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    is_latent = isinstance(spec.layers[layer].attention, LatentAttention)
    return (mistral4.sources if is_latent else separate_projections)(spec, layer, prefix)


FAMILY = replace(beside_vision("Mistral3ForConditionalGeneration", mistral3_spec), layer_sources=sources)
