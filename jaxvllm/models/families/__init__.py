"""Model families. Each turns its config into a ModelSpec, and maps the names of its tensors to our arrays."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxvllm.models.families.family import Family
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published import published_encoding
from jaxvllm.models.spec import ModelSpec

# The module of each architecture, in this package unless its name has a dot. It has a `FAMILY`, or several `FAMILIES`.
# A start imports the one that it needs: the others, and the layers that only they have, took 40 ms.
MODULES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "MiMoForCausalLM": "mimo",
    "Olmo3ForCausalLM": "olmo3",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Glm4ForCausalLM": "glm4",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "Starcoder2ForCausalLM": "starcoder2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "GraniteMoeForCausalLM": "granitemoe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "NemotronForCausalLM": "nemotron",
    "ArceeForCausalLM": "arcee",
    "PhiForCausalLM": "phi",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
    "Dots1ForCausalLM": "dots1",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "HunYuanMoEV1ForCausalLM": "hunyuan",
    "AfmoeForCausalLM": "afmoe",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "MiMoV2FlashForCausalLM": "mimo_v2",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "HYV3ForCausalLM": "hy_v3",
    "GemmaForCausalLM": "gemma",
    "GlmForCausalLM": "glm",
    "ApertusForCausalLM": "apertus",
    "StableLmForCausalLM": "stablelm",
    "SolarOpenForCausalLM": "solar_open",
    "FlexOlmoForCausalLM": "flex_olmo",
    "OlmoForCausalLM": "olmo",
    "CwmForCausalLM": "cwm",
    "InternLM3ForCausalLM": "internlm3",
    "FalconForCausalLM": "falcon",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "LagunaForCausalLM": "laguna",
    "MellumForCausalLM": "mellum",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Jais2ForCausalLM": "jais2",
    "VaultGemmaForCausalLM": "vaultgemma",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Mamba2ForCausalLM": "mamba2",
    "BambaForCausalLM": "bamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "mamba",
    "JambaForCausalLM": "jamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "KimiLinearForCausalLM": "kimi_linear",
    "Mistral4ForCausalLM": "mistral4",
    "YoutuForCausalLM": "youtu",
    "BloomForCausalLM": "bloom",
    "MptForCausalLM": "mpt",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "LongcatFlashForCausalLM": "longcat_flash",
    "Step3p7ForConditionalGeneration": "step3p7",
    "Step3TextForCausalLM": "step3",
    "Step3VLForConditionalGeneration": "step3",
}


def find_family(config: Mapping[str, Any]) -> Family:
    """Returns the family of `architectures[0]`. For any other name, raises ValueError that lists the supported ones."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    for architecture, module in MODULES.items():
        # A model that was saved without its LM head has another name of the same architecture.
        if name in (architecture, architecture.replace("ForCausalLM", "Model")):
            return _family(architecture, module)
    raise ValueError(f"architecture {name!r} is not supported: supported are {', '.join(MODULES)}")


def _family(architecture: str, module: str) -> Family:
    found = import_module(module if "." in module else f"{__name__}.{module}")
    families: tuple[Family, ...] = getattr(found, "FAMILIES", None) or (found.FAMILY,)
    return next(family for family in families if family.architecture == architecture)


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
