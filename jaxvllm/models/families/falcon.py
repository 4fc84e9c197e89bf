"""Falcon 7B, 11B, 40B and 180B: attention and FFN beside each other, after one LayerNorm or one each, and a rope.

Falcon RW has slopes (ALiBi) in the place of a rope, and its FFN follows attention. transformers rounds their products
with positions to bfloat16; here they are float32.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block, Placement
from jaxvllm.models.families.bloom import bloom_slopes
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, named_norms, qkv_by_head, with_biases


def falcon_spec(config: HfConfig) -> ModelSpec:
    is_new, is_parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    num_heads = config.integer("num_attention_heads", 71)
    # The first Falcons have one KV head or, without multi_query, as many as query heads.
    num_kv_heads = 1 if config.flag("multi_query", True) else num_heads
    if is_new:
        config.refuse({"parallel_attn": (None, True)})
        num_kv_heads = config.integer("num_kv_heads", num_heads)
    norms = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if norms > (2 if is_new else 1):
        raise ValueError(
            f"config num_ln_in_parallel_attn {norms} is not supported: there are one or, in newer ones, two"
        )
    placement: Placement = "pre" if not is_parallel else "twin" if norms == 2 else "parallel"
    config = config.with_defaults(
        hidden_size=4544,
        num_hidden_layers=32,
        vocab_size=65_024,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    values = dict(config.values) | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    usual = UsualParts(replace(config, values=values))
    norm, has_bias = LayerNorm(config.number("layer_norm_epsilon", 1e-5)), config.flag("bias", False)
    size = config.integer("ffn_hidden_size", 4 * usual.hidden_size)
    attention = replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias)
    has_slopes = config.flag("alibi", False)
    if has_slopes:
        attention = replace(attention, slopes=tuple(attention.scale * slope for slope in bloom_slopes(num_heads)))
    layer = Block(
        norm=norm,
        placement=placement,
        attention=attention,
        ffn=PlainFfn(usual.hidden_size, size, config.activation("activation", "gelu"), has_bias),
        rope=None if has_slopes else usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which stores the query heads, key and value of a KV head together, as we do."""
    decls, is_twin = declare_layer(spec, layer), spec.layers[layer].placement == "twin"
    names = ("ln_attn", "ln_mlp") if is_twin else ("input_layernorm", "post_attention_layernorm")
    found = named_norms(decls, prefix, dict(zip(("attention_norm", "ffn_norm"), names, strict=True)))
    matrices = {"o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    found |= with_biases(decls, prefix, matrices)
    return found | qkv_by_head(decls, f"{prefix}self_attention.query_key_value")


FAMILY = Family(
    "FalconForCausalLM",
    falcon_spec,
    layer_sources=sources,
    names=OuterNames(embed="word_embeddings.weight", final_norm="ln_f", layers="h"),
    prefixes=("transformer.",),
)
