"""ERNIE 4.5, dense: a Llama whose rope turns neighbours, with biases where the config says so."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def ernie4_5_spec(config: HfConfig) -> ModelSpec:
    values = {"head_dim": 128} | dict(config.values)
    spec = llama_spec(replace(config, values=values), theta=500_000.0, eps=1e-5, tied=True, num_kv_heads=2)
    has_bias = config.flag("use_bias", False)
    return replace(spec, rope_pairs="neighbours", qkv_bias=has_bias, o_bias=has_bias, ffn_bias=has_bias)


FAMILY = Family("Ernie4_5ForCausalLM", ernie4_5_spec)
