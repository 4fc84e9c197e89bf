"""The architectures of GGUF files that keep states: linear attention, Mamba, Mamba-2 and short convolutions."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.published import gguf_latent_keys, gguf_rebuilt
from jaxvllm.models.published import gguf_names as names
from jaxvllm.models.published import gguf_own_keys as own_keys
from jaxvllm.models.published import gguf_state_keys as state_keys
from jaxvllm.models.published.gguf_architecture import EXPERT_KEYS, GgufArchitecture

_LINEAR_KEYS = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "group_count", "state_size", "time_step_rank", "inner_size")
)
_GRANITE_HYBRID = GgufArchitecture(
    "GraniteMoeHybridForCausalLM",
    {
        **names.USUAL,
        **names.MAMBA2,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    state_keys.granite_hybrid,
    has_turned_heads=True,
    needs=_LINEAR_KEYS,
    present={"attention_bias": "attn_q.bias", "mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
    understood=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    rebuilt=gguf_rebuilt.GRANITE_HYBRID,
)
GRANITE_HYBRID_DENSE = replace(
    _GRANITE_HYBRID,
    tensors={**_GRANITE_HYBRID.tensors, "ffn_down": "shared_mlp.output_linear"},
    rebuilt=gguf_rebuilt.GRANITE_HYBRID_DENSE,
)
_NEMOTRON_H = GgufArchitecture(
    "NemotronHForCausalLM",
    names.MIXER,
    state_keys.nemotron_h,
    needs=_LINEAR_KEYS,
    present={"use_conv_bias": "ssm_conv1d.bias"},
    rebuilt=gguf_rebuilt.MAMBA2,
    norm_epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
    lacks=("feed_forward_length",),
    outside={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
)
_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
_MAMBA_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "state_size", "time_step_rank", "inner_size"))
_MAMBA2 = GgufArchitecture(
    "Mamba2ForCausalLM",
    names.MIXER,
    state_keys.mamba2,
    needs=_LINEAR_KEYS,
    present={"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"},
    rebuilt=gguf_rebuilt.MAMBA2,
    norm_epsilon=(_RMS_EPSILON, "layer_norm_epsilon"),
    outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    prefix="backbone.",
    has_attention=False,
)
_MAMBA = replace(
    _MAMBA2,
    family="MambaForCausalLM",
    tensors={**{name: own.replace("mamba.", "mixer.") for name, own in names.MAMBA.items()}, "attn_norm": "norm"},
    own_keys=state_keys.mamba,
    needs=_MAMBA_KEYS,
    rebuilt=gguf_rebuilt.MAMBA,
)
# Files do not have the epsilon of the norms inside: that of all published models is the usual one.
FALCON_MAMBA = replace(_MAMBA, family="FalconMambaForCausalLM")
HYBRIDS: Mapping[str, GgufArchitecture] = {
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        {
            **names.HYBRID,
            **names.EXPERTS,
            **names.GATED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            "ssm_in": "linear_attn.in_proj_qkvz",  # in the first files
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_out": "linear_attn.out_proj",
        },
        own_keys.qwen3_next,
        norm_offset=1.0,
        needs=(*EXPERT_KEYS, "expert_shared_feed_forward_length", *_LINEAR_KEYS),
        rebuilt=gguf_rebuilt.QWEN3_NEXT,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        {**names.HYBRID, **names.NEXT_TOKENS},
        own_keys.linear_attention,
        norm_offset=1.0,
        needs=_LINEAR_KEYS,
        rebuilt=gguf_rebuilt.QWEN3_5,
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM",
        {**names.HYBRID, **names.EXPERTS, **names.GATED_EXPERT, **names.NEXT_TOKENS, "ffn_gate_inp": "mlp.gate"},
        own_keys.qwen3_next,
        norm_offset=1.0,
        needs=(*EXPERT_KEYS, "expert_shared_feed_forward_length", *_LINEAR_KEYS),
        lacks=("feed_forward_length",),
        rebuilt=gguf_rebuilt.QWEN3_5,
    ),
    "lfm2": GgufArchitecture(
        "Lfm2ForCausalLM",
        {**names.USUAL, **names.CONVOLUTION},
        own_keys.lfm2,
        needs=("shortconv.l_cache",),
        present={"conv_bias": "shortconv.conv.bias"},
        norm_epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
        outside={"token_embd_norm": "model.embedding_norm"},
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        {
            **names.USUAL,
            **names.CONVOLUTION,
            **{f"ffn_{half}_exps": f"feed_forward.experts.*.{own}" for half, own in names.HALVES.items()},
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        own_keys.lfm2_moe,
        needs=("shortconv.l_cache", "leading_dense_block_count", *EXPERT_KEYS),
        present={"conv_bias": "shortconv.conv.bias"},
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},
        norm_epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
        outside={"token_embd_norm": "model.embedding_norm"},
    ),
    "granitehybrid": _GRANITE_HYBRID,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "jamba": GgufArchitecture(
        "JambaForCausalLM",
        {
            **names.USUAL,
            **names.MAMBA,
            **names.FEED_FORWARD,
            **{f"ffn_{half}_exps": f"feed_forward.experts.*.{half}_proj" for half in ("gate", "up", "down")},
            "ffn_gate_inp": "feed_forward.router",
        },
        state_keys.jamba,
        needs=_MAMBA_KEYS,
        present={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        rebuilt=gguf_rebuilt.JAMBA,
        outside={"output_norm": "model.final_layernorm"},
    ),
    "falcon-h1": GgufArchitecture(
        "FalconH1ForCausalLM",
        {**names.USUAL, **names.MAMBA2, **names.FEED_FORWARD},
        state_keys.falcon_h1,
        needs=_LINEAR_KEYS,
        present={
            "attention_bias": "attn_q.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
            "mamba_rms_norm": "ssm_norm.weight",
            "mlp_bias": "ffn_down.bias",
            "projectors_bias": "ssm_out.bias",
        },
        rebuilt=gguf_rebuilt.FALCON_H1,
        outside={"output_norm": "model.final_layernorm"},
    ),
    "kimi-linear": GgufArchitecture(
        "KimiLinearForCausalLM",
        {
            **names.USUAL,
            **names.LATENT,
            **names.DELTA,
            **names.MIXTRAL_EXPERTS,
            **{f"ffn_{half}_shexp": f"block_sparse_moe.shared_experts.{half}_proj" for half in ("gate", "up", "down")},
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        },
        gguf_latent_keys.kimi_linear,
        needs=(
            *EXPERT_KEYS,
            "expert_shared_count",
            "leading_dense_block_count",
            "rope.dimension_count",
            "attention.kv_lora_rank",
            "kda.head_dim",
            "ssm.conv_kernel",
        ),
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},
        rebuilt=gguf_rebuilt.KIMI_LINEAR,
        rows={"linear_num_heads": "blk.0.ssm_beta.weight"},  # the first layer keeps a state
        is_latent=True,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        needs=(*_NEMOTRON_H.needs, *EXPERT_KEYS, "expert_shared_feed_forward_length", "expert_shared_count"),
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},
    ),
}
