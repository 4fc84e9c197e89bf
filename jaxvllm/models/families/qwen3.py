"""Qwen 3, dense: a Llama with a norm over each query and key head."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.families.qwen2 import qwen_windows
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def qwen3_spec(config: HfConfig) -> ModelSpec:
    # The default of head_dim is 128, whatever the hidden size is.
    spec = llama_spec(replace(config, values={"head_dim": 128} | dict(config.values)))
    return replace(spec, qk_norm="head", windows=qwen_windows(config, spec.num_layers))


FAMILY = Family("Qwen3ForCausalLM", qwen3_spec)
