"""The keys of a config.json that only some architectures have, made of the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

# The key under which the metadata have the numbers of the layers that have a tensor, by its name in a layer.
LAYERS_WITH = "layers with"


def experts(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        # The file need not say so: all models of this architecture divide by the sum.
        "norm_topk_prob": values.get("expert_weights_norm", True),
    }


def mixtral(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"num_local_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"]}


def _gemma(values: Mapping[str, Any], *, of_hidden: int) -> Mapping[str, Any]:
    """Returns what Gemma 2 and 3 share. A model of `of_hidden` layers scales by the hidden size over the heads."""
    heads, hidden = values["attention.head_count"], values["embedding_length"]
    return {
        "sliding_window": values["attention.sliding_window"],
        "query_pre_attn_scalar": (
            hidden // heads if values["block_count"] == of_hidden else values.get("attention.key_length", 256)
        ),
    }


def gemma2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    caps = {
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
    }
    return {**_gemma(values, of_hidden=46), **caps}  # the 27B


def gemma3(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **_gemma(values, of_hidden=62),  # the 27B
        **_kinds({"attention.sliding_window_pattern": 6, **values}),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }


def granite(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the multipliers of Granite. Without one, logits of attention have the usual scale, as in llama.cpp.

    Files of Bamba, which are `granitehybrid` as well, state no scale.
    """
    size = values.get("attention.key_length", values["embedding_length"] // values["attention.head_count"])
    return {
        "attention_multiplier": values.get("attention.scale") or size**-0.5,
        "embedding_multiplier": values.get("embedding_scale", 1.0),
        "residual_multiplier": values.get("residual_scale", 1.0),
        "logits_scaling": values.get("logit_scale", 1.0),
    }


def glm4_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        # The layers that predict further tokens are counted as well.
        "num_hidden_layers": values["block_count"] - values.get("nextn_predict_layers", 0),
        "n_routed_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "n_shared_experts": values["expert_shared_count"],
        "first_k_dense_replace": values["leading_dense_block_count"],
        "routed_scaling_factor": values.get("expert_weights_scale", 1.0),
        "norm_topk_prob": values.get("expert_weights_norm", True),
        "n_group": values.get("expert_group_count", 1),
        "topk_group": values.get("expert_group_used_count", 1),
    }


def olmoe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "norm_topk_prob": values.get("expert_weights_norm", False),
    }


def gpt_oss(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**mixtral(values), "sliding_window": values["attention.sliding_window"]}


def phi3(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "sliding_window": values.get("attention.sliding_window") or None,
        "original_max_position_embeddings": values.get(
            "rope.scaling.original_context_length", values["context_length"]
        ),
    }


def linear_attention(values: Mapping[str, Any]) -> Mapping[str, Any]:
    heads = values["ssm.time_step_rank"]
    return {
        "num_hidden_layers": values["block_count"] - values.get("nextn_predict_layers", 0),
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
        "linear_num_key_heads": values["ssm.group_count"],
        "linear_key_head_dim": values["ssm.state_size"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": values["ssm.inner_size"] // max(heads, 1),
        "full_attention_interval": values.get("full_attention_interval", 4),
    }


def qwen2_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **experts(values),
        "norm_topk_prob": values.get("expert_weights_norm", False),
        "shared_expert_intermediate_size": values["expert_shared_feed_forward_length"],
    }


def qwen3_next(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**qwen2_moe(values), **experts(values), **linear_attention(values)}


def llama4(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # Files do not say how queries grow, nor which layers see chunks: all published models are the same in that. Only
    # Maverick, which has 128 experts, does not norm queries and keys.
    return {
        **mixtral(values),
        "intermediate_size": values["expert_feed_forward_length"],
        "intermediate_size_mlp": values["feed_forward_length"],
        "interleave_moe_layer_step": values["interleave_moe_layer_step"],
        "use_qk_norm": values["expert_count"] != 128,
        "attention_chunk_size": 8192,
    }


def cohere2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "logit_scale": values["logit_scale"],
        "sliding_window": values["attention.sliding_window"],
        **_kinds(values),
    }


def olmo3(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"sliding_window": values["attention.sliding_window"], **_kinds(values)}


def exaone4(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # The model of 1.2B has no window.
    return olmo3(values) if values.get("attention.sliding_window") else {"sliding_window": None}


def exaone_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **glm4_moe(values),
        **olmo3(values),
        "num_experts": values["expert_count"],
        "num_shared_experts": values["expert_shared_count"],
    }


def afmoe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # Files do not say that embeddings are scaled, nor which layers see everything: every fourth, as in all models.
    return {
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "num_shared_experts": values["expert_shared_count"],
        "num_dense_layers": values["leading_dense_block_count"],
        "route_scale": values.get("expert_weights_scale", 1.0),
        "sliding_window": values["attention.sliding_window"],
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def ernie4_5_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "moe_num_experts": values["expert_count"],
        "moe_k": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "moe_num_shared_experts": values["expert_shared_count"],
        "moe_layer_interval": values["interleave_moe_layer_step"],
        "moe_layer_start_index": values["leading_dense_block_count"],
    }


def hunyuan_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "num_experts": values["expert_count"],
        "moe_topk": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "num_shared_expert": values["expert_shared_count"],
    }


def lfm2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns which layers attend: the others have no heads of keys."""
    heads = of_layers(values, "attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": values["shortconv.l_cache"],
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **lfm2(values),
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "num_dense_layers": values["leading_dense_block_count"],
        "norm_topk_prob": values.get("expert_weights_norm", True),
        "routed_scaling_factor": values.get("expert_weights_scale", 1.0),
    }


def of_layers(values: Mapping[str, Any], key: str) -> list[Any]:
    """Returns a number for each layer, where one number is that of all. Raises ValueError for a list of another length.

    Layers that predict further tokens may be counted or not.
    """
    found, count = values.get(key), values["block_count"]
    if not isinstance(found, list):
        return [found] * count
    if not max(count - values.get("nextn_predict_layers", 0), 1) <= len(found) <= count:
        raise ValueError(f"{key} has {len(found)} numbers, and there are {count} layers")
    return found


def gemma3n(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Gemma 3n. Files state how many deviations above the mean the sparse gates begin."""
    scales = of_layers({"activation_sparsity_scale": -math.inf, **values}, "activation_sparsity_scale")
    return {
        **_kinds({"attention.sliding_window_pattern": 5, **values}),
        "sliding_window": values["attention.sliding_window"],
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10_000.0),
        "num_kv_shared_layers": values["attention.shared_kv_layers"],
        "altup_num_inputs": values["altup.num_inputs"],
        "altup_active_idx": values["altup.active_idx"],
        "hidden_size_per_layer_input": values["embedding_length_per_layer_input"],
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
    }


def gemma4(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Gemma 4, whose layers that see everything have larger heads, and perhaps fewer of them."""
    kinds = _kinds(values)["layer_types"]
    kv_heads, sizes = (of_layers(values, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    of_full = [count for count, kind in zip(kv_heads, kinds, strict=True) if kind == "full_attention"]
    of_sliding = [count for count, kind in zip(kv_heads, kinds, strict=True) if kind != "full_attention"]
    with_values, with_keys = (values[LAYERS_WITH].get(f"attn_{one}.weight", []) for one in "vk")
    return {
        "layer_types": kinds,
        "head_dim": values["attention.key_length_swa"],
        "global_head_dim": values["attention.key_length"],
        "num_key_value_heads": of_sliding[0] if of_sliding else of_full[0],
        "num_global_key_value_heads": of_full[0],
        "attention_k_eq_v": len(with_values) < len(with_keys),
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "sliding_window": values["attention.sliding_window"],
        "num_kv_shared_layers": values["attention.shared_kv_layers"],
        "hidden_size_per_layer_input": values["embedding_length_per_layer_input"],
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "enable_moe_block": bool(values.get("expert_count")),
        "num_experts": values.get("expert_count"),
        "top_k_experts": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
        # Files have the part of a head that turns as factors of frequencies: in all models it is a quarter.
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": values.get("rope.freq_base", 1_000_000.0),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": values.get("rope.freq_base_swa", 10_000.0)},
        },
    }


def _kinds(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns which layers have a window: every fourth has none, if the file does not say otherwise."""
    pattern = values.get("attention.sliding_window_pattern", 4)
    if isinstance(pattern, list):
        num_layers = values["block_count"] - values.get("nextn_predict_layers", 0)
        slide = of_layers(values, "attention.sliding_window_pattern")[:num_layers]
        return {"layer_types": [("full_attention", "sliding_attention")[bool(slides)] for slides in slide]}
    return {"sliding_window_pattern": pattern}
