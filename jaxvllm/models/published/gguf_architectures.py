"""`GgufArchitecture`: the names in GGUF files of an architecture, and what such files do not say of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {f"ffn_{half}_exps": f"mlp.experts.*.{half}_proj" for half in ("gate", "up", "down")}
_MIXTRAL_EXPERTS = {
    f"ffn_{half}_exps": f"block_sparse_moe.experts.*.{name}"
    for half, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


@dataclass(frozen=True)
class GgufArchitecture:
    """The family of Hugging Face that an architecture is, and how its files differ from that family's checkpoints.

    tensors: the name in a Hugging Face layer of each of a layer's tensors; `*` is the number of a matrix in a stack
    has_turned_heads: rows of queries and keys are stored so that a rope turns neighbours, not halves of a head
    norm_offset: what is added to the weights of norms before they are stored
    needs: keys of metadata that must be there, beside those of all architectures
    """

    family: str
    tensors: Mapping[str, str]
    own_keys: OwnKeys = lambda _: {}
    has_turned_heads: bool = False
    norm_offset: float = 0.0
    needs: tuple[str, ...] = ()


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
