"""InternLM 3: a Llama whose config names its biases otherwise."""

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def internlm3_spec(config: HfConfig) -> ModelSpec:
    has_bias = config.flag("bias", config.flag("mlp_bias", False))
    # The projection of the heads' outputs has a bias where the FFN has one.
    config.refuse({"qkv_bias": (None, has_bias), "attention_bias": (None, has_bias)})
    return llama_spec(
        config.with_defaults(
            head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5, attention_bias=has_bias, mlp_bias=has_bias
        )
    )


FAMILY = Family("InternLM3ForCausalLM", internlm3_spec)
