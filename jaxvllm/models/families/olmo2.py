"""OLMo 2: norms after attention and FFN, one norm over all query heads, and one over all key heads."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def olmo2_spec(config: HfConfig) -> ModelSpec:
    return replace(llama_spec(config, eps=1e-5), placement="post", qk_norm="full")


FAMILY = Family("Olmo2ForCausalLM", olmo2_spec)
