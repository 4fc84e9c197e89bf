"""MiMo 7B: a Qwen 2 with a layer beside it that predicts further tokens, which `jaxvllm.models.heads` reads."""

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mtp_format import MtpFormat
from jaxvllm.models.families.qwen2 import qwen2_spec

MTP = MtpFormat(
    block="{prefix}mtp_layers.{number}.",
    embedding_norm="{block}token_layernorm",
    feature_norm="{block}hidden_layernorm",
    fc="{block}input_proj",
    final_norm="{block}final_layernorm",
    is_feature_first=True,
    sees_states=True,
)
FAMILY = Family("MiMoForCausalLM", qwen2_spec, foreign=("model.mtp_layers.",), mtp=MTP)
