"""Arcee (AFM): a Llama with the FFN of Nemotron, squared ReLU without a gate."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.families.nemotron import sources, squared_ffn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def arcee_spec(config: HfConfig) -> ModelSpec:
    # What a Llama reads as the activation of its gate is not there.
    values = dict(config.values) | {"hidden_act": None, "rms_norm_eps": config.number("rms_norm_eps", 1e-5)}
    spec, ffn = llama_spec(replace(config, values=values)), squared_ffn(config)
    return replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer in spec.layers))


FAMILY = Family("ArceeForCausalLM", arcee_spec, layer_sources=sources)
