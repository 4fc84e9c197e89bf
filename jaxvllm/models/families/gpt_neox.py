"""GPT-NeoX and Pythia: attention and FFN beside each other, each after a LayerNorm of its own, and a partial rope."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, norm_sources, qkv_by_head, with_biases


def gpt_neox_spec(config: HfConfig) -> ModelSpec:
    # Older configs call the base and the part of a head that turns otherwise.
    values = {"hidden_act": "gelu", "partial_rotary_factor": config.number("rotary_pct", 0.25)}
    values["rope_theta"] = config.number("rotary_emb_base", 10_000.0)
    config = replace(config, values=values | {key: value for key, value in config.values.items() if value is not None})
    usual, norm = UsualParts(config), LayerNorm(config.number("layer_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias", True)
    layer = Block(
        norm=norm,
        placement="twin" if config.flag("use_parallel_residual", True) else "pre",
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias),
        ffn=PlainFfn(usual.hidden_size, usual.ffn_size, config.activation("hidden_act")),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which stores each head's query, key and value together, as we do."""
    decls = declare_layer(spec, layer)
    names = {"o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    found = norm_sources(spec, layer, prefix) | with_biases(decls, prefix, names)
    return found | qkv_by_head(decls, f"{prefix}attention.query_key_value")


FAMILY = Family(
    "GPTNeoXForCausalLM",
    gpt_neox_spec,
    layer_sources=sources,
    names=OuterNames(embed="embed_in.weight", final_norm="final_layer_norm", lm_head="embed_out.weight"),
    prefixes=("gpt_neox.",),
    redundant=(".attention.bias", ".attention.masked_bias"),
)
