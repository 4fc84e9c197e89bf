"""StableLM: a Llama with LayerNorm and a partial rope. That of 12B norms each head with weights of its own."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, separate_projections


def stablelm_spec(config: HfConfig) -> ModelSpec:
    # head_dim is what transformers writes, and does not read.
    values = {key: value for key, value in config.values.items() if key != "head_dim"}
    usual = UsualParts(replace(config, values=values).with_defaults(partial_rotary_factor=0.25, num_key_value_heads=32))
    eps = config.number("layer_norm_eps", 1e-5)
    norm, of_heads = LayerNorm(eps), LayerNorm(eps, bias=False)
    layer = Block(
        norm=norm,
        placement="parallel" if config.flag("use_parallel_residual", False) else "pre",
        attention=replace(
            usual.attention(of_heads),
            qk_norm="own" if config.flag("qk_layernorm", False) else "none",
            qkv_bias=config.flag("use_qkv_bias", False),
        ),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which has a tensor for the norm of each head."""
    decls, found = declare_layer(spec, layer), separate_projections(spec, layer, prefix)
    for key in ("q_norm", "k_norm"):
        if key in decls:
            K, heads, D = decls[key].shape
            names = (f"{prefix}self_attn.{key[0]}_layernorm.norms.{head}.weight" for head in range(K * heads))
            found[key] = tuple(
                Source(name, (D,), (*divmod(head, heads), 0), (1, 1, D)) for head, name in enumerate(names)
            )
    return found


FAMILY = Family("StableLmForCausalLM", stablelm_spec, layer_sources=sources)
