"""StarCoder, SantaCoder and Granite 20B Code (GPT BigCode): a GPT-2 with one KV head, and matrices as [out, in]."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gpt2 import gpt2_spec
from jaxvllm.models.families.usual import multi_head
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, named_norms, qkv_by_head, with_biases


def gpt_bigcode_spec(config: HfConfig) -> ModelSpec:
    spec = gpt2_spec(config.with_defaults(activation_function="gelu_pytorch_tanh"))
    if not config.flag("multi_query", True):
        return spec
    attention = multi_head(spec.hidden_size, spec.layers[0].attention.num_heads, spec.norm, has_bias=True)
    layer = replace(spec.layers[0], attention=replace(attention, num_kv_heads=1))
    return replace(spec, layers=(layer,) * spec.num_layers)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which stores the query heads, key and value of a KV head together, as we do."""
    decls = declare_layer(spec, layer)
    found = named_norms(decls, prefix, {"attention_norm": "ln_1", "ffn_norm": "ln_2"})
    found |= with_biases(decls, prefix, {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"})
    return found | qkv_by_head(decls, f"{prefix}attn.c_attn")


FAMILY = Family(
    "GPTBigCodeForCausalLM",
    gpt_bigcode_spec,
    layer_sources=sources,
    names=OuterNames(embed="wte.weight", final_norm="ln_f", positions="wpe.weight", layers="h"),
    prefixes=("transformer.",),
    redundant=(".attn.bias", ".attn.masked_bias"),
)
