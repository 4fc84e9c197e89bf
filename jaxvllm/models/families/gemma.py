"""Gemma, the first one: a Llama with norms of 1 + w, embeddings times the root of their size, and GELU."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def gemma_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6), offset=1.0)
    has_bias = usual.attention_bias
    # The first configs say gelu and mean its approximation.
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias),
        ffn=GatedFfn(usual.hidden_size, usual.ffn_size, "gelu_tanh" if activation == "gelu" else activation),
        rope=usual.rope(),
    )
    return replace(usual.model([layer] * usual.num_layers, norm), embed_scale=usual.hidden_size**0.5)


FAMILY = Family("GemmaForCausalLM", gemma_spec)
