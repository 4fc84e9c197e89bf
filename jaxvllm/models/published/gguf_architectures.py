"""`GgufArchitecture`: the names in GGUF files of an architecture, and what such files do not say of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxvllm.gguf_file import GgufFile

# Returns the keys of a config.json that only this architecture has, from the metadata under its name.
OwnKeys = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_USUAL: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_USUAL_PRESENT: Mapping[str, str] = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHARED_EXPERT = {f"ffn_{half}_shexp": f"mlp.shared_experts.{half}_proj" for half in ("gate", "up", "down")}
_EXPERTS = {f"ffn_{half}_exps": f"mlp.experts.*.{half}_proj" for half in ("gate", "up", "down")}
_MIXTRAL_EXPERTS = {
    f"ffn_{half}_exps": f"block_sparse_moe.experts.*.{name}"
    for half, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


@dataclass(frozen=True)
class GgufArchitecture:
    """The family of Hugging Face that an architecture is, and how its files differ from that family's checkpoints.

    tensors: the name in a Hugging Face layer of each of a layer's tensors; `*` is the number of a matrix in a stack. A
        name with its kind, such as `x.bias`, comes before that of all kinds. Where two tensors have the same name, that
        one tensor has their rows alternately: the first row of the first, the first row of the second, and so on
    turned: the ends of the names of stacks of matrices that a file has the other way round
    present: keys of a config.json that say whether there are such tensors as one of the first layer
    has_turned_heads: rows of queries and keys are stored so that a rope turns neighbours, not halves of a head
    norm_offset: what is added to the weights of norms before they are stored
    needs: keys of metadata that must be there, beside those of all architectures
    understood: keys that `own_keys` takes into account, and others refuse
    usual_values: the only values that are known of some keys, where they are others than for most
    refused: keys that change the model in a way that is not known
    rope_parameters: what files do not say of a rope
    """

    family: str
    tensors: Mapping[str, str]
    own_keys: OwnKeys = lambda _: {}
    has_turned_heads: bool = False
    norm_offset: float = 0.0
    needs: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=lambda: _USUAL_PRESENT)
    understood: tuple[str, ...] = ()
    usual_values: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)


def _experts(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "moe_intermediate_size": values["expert_feed_forward_length"],
        # The file need not say so: all models of this architecture divide by the sum.
        "norm_topk_prob": values.get("expert_weights_norm", True),
    }


def _mixtral(values: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _gemma2(values: Mapping[str, Any]) -> Mapping[str, Any]:
    caps = {
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
    }
    return {**_gemma(values, of_hidden=46), **caps}  # the 27B


def _gemma3(values: Mapping[str, Any]) -> Mapping[str, Any]:
    pattern = values.get("attention.sliding_window_pattern", 6)
    kinds: Mapping[str, Any] = {"sliding_window_pattern": pattern}
    if isinstance(pattern, list):
        kinds = {"layer_types": [("full_attention", "sliding_attention")[bool(slides)] for slides in pattern]}
    return {
        **_gemma(values, of_hidden=62),  # the 27B
        **kinds,
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }


def _granite(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "attention_multiplier": values.get("attention.scale", 1.0),
        "embedding_multiplier": values.get("embedding_scale", 1.0),
        "residual_multiplier": values.get("residual_scale", 1.0),
        "logits_scaling": values.get("logit_scale", 1.0),
    }


def _glm4_moe(values: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _olmoe(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "num_experts": values["expert_count"],
        "num_experts_per_tok": values["expert_used_count"],
        "norm_topk_prob": values.get("expert_weights_norm", False),
    }


def _gpt_oss(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_mixtral(values), "sliding_window": values["attention.sliding_window"]}


def _phi3(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "sliding_window": values.get("attention.sliding_window") or None,
        "original_max_position_embeddings": values.get(
            "rope.scaling.original_context_length", values["context_length"]
        ),
    }


_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_WINDOW_KEY = ("attention.sliding_window",)
# By `general.architecture`. Llama 2 and 3, Mistral, SmolLM and others are all `llama`.
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", _USUAL, has_turned_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _USUAL),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", {**_USUAL, **_HEAD_NORMS}),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM",
        {**_USUAL, **_HEAD_NORMS, **_EXPERTS, "ffn_gate_inp": "mlp.gate"},
        _experts,
        needs=_EXPERT_KEYS,
    ),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        {**_USUAL, **_SANDWICH},
        _gemma2,
        norm_offset=1.0,
        needs=_WINDOW_KEY,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        {**_USUAL, **_SANDWICH, **_HEAD_NORMS},
        _gemma3,
        norm_offset=1.0,
        needs=_WINDOW_KEY,
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", {**_USUAL, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _phi3
    ),
    "arcee": GgufArchitecture("ArceeForCausalLM", _USUAL, has_turned_heads=True),
    "dots1": GgufArchitecture(
        "Dots1ForCausalLM",
        {
            **_USUAL,
            **_HEAD_NORMS,
            **_EXPERTS,
            **_SHARED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        _glm4_moe,
        needs=(*_EXPERT_KEYS, "expert_shared_count", "leading_dense_block_count"),
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", _USUAL, present={"use_bias": "attn_output.bias"}),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        {
            **_USUAL,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        present={"attention_bias": "attn_q.bias"},
        refused=("nextn_predict_layers", "rope.dimension_sections"),  # GLM-OCR, and GLM-4V, whose heads are turned
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        {
            **_USUAL,
            **_HEAD_NORMS,
            **_EXPERTS,
            **_SHARED_EXPERT,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
            "nextn.shared_head_head": "shared_head.head",
            "nextn.shared_head_norm": "shared_head.norm",
        },
        _glm4_moe,
        needs=(*_EXPERT_KEYS, "expert_shared_count", "leading_dense_block_count"),
        present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},  # a sigmoid
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        {
            **_USUAL,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        _gpt_oss,
        needs=(*_EXPERT_KEYS[:2], *_WINDOW_KEY),
        present={"attention_bias": "attn_q.bias"},
        usual_values={"expert_gating_func": 3},  # a softmax over the chosen experts
        turned=("experts.gate_up_proj", "experts.down_proj"),
        rope_parameters={"truncate": False},
    ),
    "granite": GgufArchitecture(
        "GraniteForCausalLM",
        _USUAL,
        _granite,
        has_turned_heads=True,
        understood=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    ),
    "hunyuan-dense": GgufArchitecture(
        "HunYuanDenseV1ForCausalLM",
        {**_USUAL, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM",
        {
            **_USUAL,
            **_HEAD_NORMS,
            **_MIXTRAL_EXPERTS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        _mixtral,
        needs=_EXPERT_KEYS[:2],
        usual_values={"expert_gating_func": 2},
    ),
    "olmoe": GgufArchitecture(
        "OlmoeForCausalLM",
        {**_USUAL, **_HEAD_NORMS, **_EXPERTS, "ffn_gate_inp": "mlp.gate"},
        _olmoe,
        needs=_EXPERT_KEYS[:2],
    ),
    "olmo2": GgufArchitecture(
        "Olmo2ForCausalLM",
        {**_USUAL, **_HEAD_NORMS, **_SANDWICH},
        refused=("attention.sliding_window",),  # OLMo 3
    ),
    "seed_oss": GgufArchitecture(
        "SeedOssForCausalLM",
        {**_USUAL, "post_attention_norm": "post_attention_layernorm"},
        present={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"},
    ),
    # Files do not say which layers have no positions: llama.cpp takes every fourth, as all published models do.
    "smollm3": GgufArchitecture(
        "SmolLM3ForCausalLM", _USUAL, lambda _: {"no_rope_layer_interval": 4}, has_turned_heads=True
    ),
}
_MIXTRAL = GgufArchitecture(
    "MixtralForCausalLM",
    {**_USUAL, **_MIXTRAL_EXPERTS, "ffn_gate_inp": "block_sparse_moe.gate"},
    _mixtral,
    has_turned_heads=True,
    needs=_EXPERT_KEYS[:2],
)
OUTSIDE: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# These are in the config, as the scaling of the rope.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """Returns the architecture of a file and its name. Raises ValueError that names one that is not known."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} has general.architecture {name!r}, which is not supported in GGUF: supported are "
            f"{', '.join(ARCHITECTURES)}. Take the model's checkpoint in safetensors"
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return name, _MIXTRAL
    return name, ARCHITECTURES[name]
