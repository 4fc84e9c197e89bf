"""VaultGemma: a Gemma 2 without the norms after attention and FFN."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gemma2 import gemma2_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, gated_ffn_sources, named_norms

NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}


def vaultgemma_spec(config: HfConfig) -> ModelSpec:
    spec = gemma2_spec(config)
    return replace(spec, layers=tuple(replace(layer, placement="pre") for layer in spec.layers))


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    norms = named_norms(declare_layer(spec, layer), prefix, NORMS)
    return norms | attention_sources(spec, layer, prefix) | gated_ffn_sources(spec, layer, prefix)


FAMILY = Family("VaultGemmaForCausalLM", vaultgemma_spec, layer_sources=sources)
