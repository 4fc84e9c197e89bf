"""Llama 2, 3, 3.1, and models that share their architecture. Other families start from this spec."""

from jaxvllm.models.families.family import Family
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def llama_spec(
    config: HfConfig,
    *,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    tied: bool = False,
    num_kv_heads: int | None = None,
) -> ModelSpec:
    """Returns the spec of a Llama. The keyword arguments are the family's defaults for keys that a config leaves out.

    With `num_kv_heads` None there are as many KV heads as query heads.
    """
    num_layers = config.integer("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_size = config.integer("head_dim", hidden_size // num_heads)
    max_position = config.integer("max_position_embeddings")
    rope, _ = config.ropes(theta, head_size, max_position)
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_kv_heads or num_heads),
        head_size=head_size,
        ffn_size=config.integer("intermediate_size"),
        norm=RmsNorm(config.number("rms_norm_eps", eps)),
        max_position=config.served_positions(config.rope_parameters(), max_position),
        attention_scale=head_size**-0.5,
        windows=(None,) * num_layers,
        ropes=(rope,),
        layer_rope=(0,) * num_layers,
        activation=config.activation("hidden_act", "silu"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        ffn_bias=config.flag("mlp_bias", False),
        tie_embeddings=config.flag("tie_word_embeddings", tied),
    )


FAMILY = Family("LlamaForCausalLM", llama_spec)
