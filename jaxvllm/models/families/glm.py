"""GLM-4 (9B of 2024): a GLM-4 of 2025 with norms before attention and FFN alone."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4 import glm4_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, fused_gate_up, norm_sources, with_biases


def glm_spec(config: HfConfig) -> ModelSpec:
    spec = glm4_spec(config)
    return replace(spec, layers=tuple(replace(layer, placement="pre") for layer in spec.layers))


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    found |= with_biases(decls, prefix, {"down": "mlp.down_proj"})
    return found | {"gate_up": fused_gate_up(decls["gate_up"], f"{prefix}mlp.gate_up_proj.weight")}


FAMILY = Family("GlmForCausalLM", glm_spec, layer_sources=sources)
