"""The keys of a config.json of models with Mamba and Mamba-2, made of the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxvllm.models.published.gguf_own_keys import LAYERS_WITH, granite, of_layers


def granite_hybrid(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Granite 4, whose layers without heads of keys are Mamba-2."""
    heads, kv_heads = values["ssm.time_step_rank"], of_layers(values, "attention.head_count_kv")
    return {
        **granite(values),
        "num_local_experts": values.get("expert_count", 0),
        "num_experts_per_tok": values.get("expert_used_count", 1) or 1,
        "shared_intermediate_size": values.get("expert_shared_feed_forward_length", values["feed_forward_length"]),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if values.get("rope.scaling.finetuned") else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": values["ssm.inner_size"] // max(heads, 1),
        "mamba_n_groups": values["ssm.group_count"],
        "mamba_d_state": values["ssm.state_size"],
        "mamba_d_conv": values["ssm.conv_kernel"],
        "mamba_expand": values["ssm.inner_size"] // values["embedding_length"],
    }


def nemotron_h(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Nemotron-H. A layer attends, or has an FFN, or is Mamba-2."""
    count = values["block_count"] - values.get("nextn_predict_layers", 0)
    kv_heads, sizes = (of_layers(values, key)[:count] for key in ("attention.head_count_kv", "feed_forward_length"))
    heads, ffn = values["ssm.time_step_rank"], "moe" if values.get("expert_count") else "mlp"
    kinds = ["attention" if kv else ffn if size else "mamba" for kv, size in zip(kv_heads, sizes, strict=True)]
    keys = {
        "num_key_value_heads": max(kv_heads),
        "intermediate_size": max(sizes),
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": values["ssm.inner_size"] // max(heads, 1),
        "n_groups": values["ssm.group_count"],
        "ssm_state_size": values["ssm.state_size"],
        "conv_kernel": values["ssm.conv_kernel"],
    }
    if ffn == "mlp":
        return keys
    return keys | {
        "n_routed_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        "moe_shared_expert_intermediate_size": values["expert_shared_feed_forward_length"],
        "n_shared_experts": values["expert_shared_count"],
        "moe_latent_size": values.get("moe_latent_size"),
        "routed_scaling_factor": values.get("expert_weights_scale", 1.0),
        "norm_topk_prob": values.get("expert_weights_norm", True),
        "n_group": values.get("expert_group_count", 1),
        "topk_group": values.get("expert_group_used_count", 1),
    }


def mamba(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "intermediate_size": values["ssm.inner_size"],
        "state_size": values["ssm.state_size"],
        "conv_kernel": values["ssm.conv_kernel"],
        "time_step_rank": values["ssm.time_step_rank"],
    }


def mamba2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    heads = values["ssm.time_step_rank"]
    return {
        "num_heads": heads,
        "head_dim": values["ssm.inner_size"] // max(heads, 1),
        "expand": values["ssm.inner_size"] // values["embedding_length"],
        "n_groups": values["ssm.group_count"],
        "state_size": values["ssm.state_size"],
        "conv_kernel": values["ssm.conv_kernel"],
    }


def jamba(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Jamba, whose layers without heads of keys are Mamba. Its experts only the tensors tell."""
    count, kv_heads = values["block_count"], of_layers(values, "attention.head_count_kv")
    keys = {
        "num_key_value_heads": max(kv_heads),
        **_every(count, "attn_layer", [number for number, of in enumerate(kv_heads) if of]),
        "mamba_expand": values["ssm.inner_size"] // values["embedding_length"],
        "mamba_d_state": values["ssm.state_size"],
        "mamba_d_conv": values["ssm.conv_kernel"],
        "mamba_dt_rank": values["ssm.time_step_rank"],
        "num_experts": 1,
    }
    with_experts = values[LAYERS_WITH].get("ffn_gate_inp.weight")
    if with_experts is None:
        return keys
    return {
        **keys,
        **_every(count, "expert_layer", sorted(with_experts)),
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
    }


def _every(num_layers: int, key: str, numbers: Sequence[int]) -> Mapping[str, int]:
    """Returns the period and the offset that say which layers these are. Raises ValueError if none do."""
    first, second = (*numbers[:2], num_layers, 2 * num_layers)[:2]
    period = second - first if len(numbers) > 1 else num_layers
    if list(numbers) != list(range(first, num_layers, max(period, 1))) or first >= period:
        raise ValueError(f"{key}s are {list(numbers)} of {num_layers}, and should be one in each of equal periods")
    return {f"{key}_period": period, f"{key}_offset": first}


def falcon_h1(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of Falcon-H1. The weights are stored with their multipliers, so that these are 1 here.

    A head that is tied has another multiplier than the embedding, which files do not have: `output.weight` must be
    there. Files do not say that gates come before the norm, as in all published models.
    """
    heads = values["ssm.time_step_rank"]
    return {
        "tie_word_embeddings": False,
        "mamba_norm_before_gate": False,
        "mamba_d_ssm": values["ssm.inner_size"],
        "mamba_n_heads": heads,
        "mamba_d_head": values["ssm.inner_size"] // max(heads, 1),
        "mamba_n_groups": values["ssm.group_count"],
        "mamba_d_state": values["ssm.state_size"],
        "mamba_d_conv": values["ssm.conv_kernel"],
    }
