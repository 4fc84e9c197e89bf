"""The keys of a config.json of models whose keys and values are made of a latent, from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

from jaxvllm.models.published.gguf_own_keys import LAYERS_WITH, glm4_moe, of_layers


def latent(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of latent attention, and of experts beside it."""
    rope = values["rope.dimension_count"]
    return {
        **glm4_moe(values),
        "norm_topk_prob": values.get("expert_weights_norm", False),
        "q_lora_rank": values.get("attention.q_lora_rank") or None,
        "kv_lora_rank": values["attention.kv_lora_rank"],
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": _size(values, "key") - rope,
        "v_head_dim": _size(values, "value"),
        "topk_method": None,
    }


def deepseek_v2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # Older files do not say that the 236B, which alone has 160 experts, chooses three groups of eight.
    groups, chosen = (8, 3) if values["expert_count"] == 160 else (1, 1)
    groups = values.get("expert_group_count", groups)
    return {
        **latent(values),
        "n_group": groups,
        "topk_group": values.get("expert_group_used_count", chosen),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def deepseek_v3(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # Older files do not say that V3 and R1, which have 256 experts, choose four groups of eight. Kimi K2 has no groups.
    groups, chosen = (8, 4) if values["expert_count"] == 256 else (1, 1)
    return {
        **latent(values),
        "n_group": values.get("expert_group_count", groups),
        "topk_group": values.get("expert_group_used_count", chosen),
    }


def _size(values: Mapping[str, Any], of: str) -> int:
    """Returns the size of the keys or the values of a head. Newer files have that of what is cached beside it."""
    newer, older = f"attention.{of}_length_mla", f"attention.{of}_length"
    return values[newer] if newer in values else values[older]


def _index(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of an index, which chooses what queries attend to."""
    return {
        "index_n_heads": values["attention.indexer.head_count"],
        "index_head_dim": values["attention.indexer.key_length"],
        "index_topk": values["attention.indexer.top_k"],
    }


def deepseek_v32(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**deepseek_v3(values), **_index(values)}


def glm_moe_dsa(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of GLM-5. Files of GLM-5.2 may not say which layers have an index, but only these have one."""
    keys = {**latent(values), **_index(values)}
    with_index = set(values[LAYERS_WITH].get("indexer.attn_k.weight", []))
    numbers = range(keys["num_hidden_layers"])
    has_index = [number in with_index for number in numbers]
    if "attention.indexer.types" in values:
        has_index = of_layers(values, "attention.indexer.types")[: len(numbers)]
    return {**keys, "indexer_types": ["full" if has else "shared" for has in has_index]}


def kimi_linear(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Kimi Linear, whose layers without heads of keys keep states.

    Files do not say that the weights of experts are divided by their sum, as in the published model.
    """
    kv_heads = of_layers(values, "attention.head_count_kv")
    return {
        **latent(values),
        "norm_topk_prob": values.get("expert_weights_norm", True),
        "num_key_value_heads": values["attention.head_count"],
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "linear_head_dim": values["kda.head_dim"],
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
    }
