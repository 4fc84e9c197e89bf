"""Model families. Each turns its config into a ModelSpec, and maps the names of its tensors to our arrays."""

from collections.abc import Mapping
from typing import Any

from jaxvllm.models.families import (
    afmoe,
    apertus,
    arcee,
    bailing_hybrid,
    bamba,
    bloom,
    cohere,
    cohere2_moe,
    cwm,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    flex_olmo,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    hunyuan,
    hy_v3,
    hyperclovax,
    internlm3,
    jais2,
    jamba,
    kimi_linear,
    laguna,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
    longcat_flash,
    mamba,
    mamba2,
    mellum,
    mimo,
    mimo_v2,
    minimax_m2,
    ministral3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    mpt,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    step3,
    step3p7,
    vaultgemma,
    youtu,
)
from jaxvllm.models.families.family import Family
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published import published_encoding
from jaxvllm.models.spec import ModelSpec

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma2.FAMILY,
    *gemma3.FAMILIES,
    *gemma4.FAMILIES,
    phi3.FAMILY,
    olmo2.FAMILY,
    smollm3.FAMILY,
    granite.FAMILY,
    mimo.FAMILY,
    olmo3.FAMILY,
    ministral3.FAMILY,
    mistral3.FAMILY,
    glm4.FAMILY,
    *cohere.FAMILIES,
    gpt2.FAMILY,
    opt.FAMILY,
    exaone4.FAMILY,
    seed_oss.FAMILY,
    starcoder2.FAMILY,
    ernie4_5.FAMILY,
    gpt_neox.FAMILY,
    *qwen3_5.FAMILIES,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    glm4_moe.FAMILY,
    minimax_m2.FAMILY,
    ernie4_5_moe.FAMILY,
    granitemoe.FAMILY,
    *qwen3_5_moe.FAMILIES,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    *deepseek_v3.NESTED,
    glm4_moe_lite.FAMILY,
    deepseek_v32.FAMILY,
    glm_moe_dsa.FAMILY,
    gpt_oss.FAMILY,
    nemotron.FAMILY,
    arcee.FAMILY,
    phi.FAMILY,
    *phimoe.FAMILIES,
    dots1.FAMILY,
    *hunyuan.FAMILIES,
    afmoe.FAMILY,
    *llama4.FAMILIES,
    mimo_v2.FAMILY,
    cohere2_moe.FAMILY,
    exaone_moe.FAMILY,
    hy_v3.FAMILY,
    gemma.FAMILY,
    glm.FAMILY,
    apertus.FAMILY,
    stablelm.FAMILY,
    solar_open.FAMILY,
    flex_olmo.FAMILY,
    olmo.FAMILY,
    cwm.FAMILY,
    internlm3.FAMILY,
    falcon.FAMILY,
    gpt_bigcode.FAMILY,
    laguna.FAMILY,
    mellum.FAMILY,
    hyperclovax.FAMILY,
    jais2.FAMILY,
    vaultgemma.FAMILY,
    qwen3_next.FAMILY,
    lfm2.FAMILY,
    lfm2_moe.FAMILY,
    mamba2.FAMILY,
    bamba.FAMILY,
    granitemoehybrid.FAMILY,
    nemotron_h.FAMILY,
    *mamba.FAMILIES,
    jamba.FAMILY,
    falcon_h1.FAMILY,
    kimi_linear.FAMILY,
    mistral4.FAMILY,
    youtu.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    *gemma3n.FAMILIES,
    bailing_hybrid.FAMILY,
    longcat_flash.FAMILY,
    step3p7.FAMILY,
    *step3.FAMILIES,
)


def find_family(config: Mapping[str, Any]) -> Family:
    """Returns the family of `architectures[0]`. For any other name, raises ValueError that lists the supported ones."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    for family in FAMILIES:
        # A model that was saved without its LM head has another name of the same architecture.
        if name in (family.architecture, family.architecture.replace("ForCausalLM", "Model")):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(f"architecture {name!r} is not supported: supported are {supported}")


def model_spec(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """Returns the spec of a config.json. Raises ValueError for a value that the decoder would not compute faithfully.

    `max_model_len` is the longest sequence, in tokens, that will be served; None is `spec.max_position`. Scalings that
    depend on a sequence's length in transformers depend on this length here.
    """
    if max_model_len is not None and max_model_len < 1:
        raise ValueError(f"max_model_len must be at least 1, not {max_model_len}")
    family = find_family(config)
    published_encoding(config)  # one that is not known is an error now, before any weight is read
    inner = family.text_config(config)
    spec = family.spec(HfConfig(inner, max_model_len, family.understood))
    if max_model_len is not None and max_model_len > spec.max_position:
        raise ValueError(
            f"max_model_len {max_model_len} exceeds the {spec.max_position} positions of the model: lower it"
        )
    return spec
