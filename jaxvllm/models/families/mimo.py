"""MiMo 7B: a Qwen 2 with a layer beside it that predicts further tokens, which `jaxvllm.models.heads` reads."""

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.qwen2 import qwen2_spec

FAMILY = Family("MiMoForCausalLM", qwen2_spec, foreign=("model.mtp_layers.",))
