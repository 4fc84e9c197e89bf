"""HyperCLOVA X SEED Think: a Granite with norms after attention and FFN too, whose logits are multiplied."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.granite import granite_spec
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, gated_ffn_sources, named_norms

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_norm1",
    "ffn_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_norm2",
}


def hyperclovax_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(attention_multiplier=UsualParts(config).head_size ** -0.5)
    spec, is_normed_after = granite_spec(config), config.flag("use_post_norm", True)
    layer = replace(spec.layers[0], placement="sandwich" if is_normed_after else "pre")
    logit_scale = config.number("logits_scaling", 1.0)
    return replace(spec, layers=(layer,) * spec.num_layers, logit_scale=logit_scale)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    norms = named_norms(declare_layer(spec, layer), prefix, NORMS)
    return norms | attention_sources(spec, layer, prefix) | gated_ffn_sources(spec, layer, prefix)


FAMILY = Family("HyperCLOVAXForCausalLM", hyperclovax_spec, layer_sources=sources)
