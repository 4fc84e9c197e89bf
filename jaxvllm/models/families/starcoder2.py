"""StarCoder 2: LayerNorm, biases everywhere, a window, and no gate in the FFN."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, norm_sources, with_biases


def starcoder2_spec(config: HfConfig) -> ModelSpec:
    has_bias, activation = config.flag("use_bias", True), config.activation("hidden_act", "gelu_pytorch_tanh")
    spec = llama_spec(config, tied=True, num_kv_heads=2)
    window = config.optional_integer("sliding_window")
    return replace(
        spec,
        norm=LayerNorm(config.number("norm_epsilon", 1e-5)),
        qkv_bias=has_bias,
        o_bias=has_bias,
        windows=(window,) * spec.num_layers,
        ffns=(PlainFfn(spec.hidden_size, spec.ffn_size, activation, has_bias),) * spec.num_layers,
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    ffn = with_biases(decls, prefix, {"up": "mlp.c_fc", "down": "mlp.c_proj"})
    return norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix) | ffn


FAMILY = Family("Starcoder2ForCausalLM", starcoder2_spec, layer_sources=sources)
