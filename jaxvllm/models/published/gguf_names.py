"""The names of tensors in GGUF files, and those of the same tensors in a checkpoint of Hugging Face.

`*` is the number of a matrix in a stack.
"""

from collections.abc import Mapping

OUTSIDE: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
USUAL: Mapping[str, str] = {
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
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SHARED_EXPERT = {f"ffn_{half}_shexp": f"mlp.shared_experts.{half}_proj" for half in ("gate", "up", "down")}
GATED_EXPERT = {
    **{f"ffn_{half}_shexp": f"mlp.shared_expert.{half}_proj" for half in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# The layers after the last one, which predict further tokens.
NEXT_TOKENS = {
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # in older files
}
INDEX = {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
LINEAR = {"ssm_norm": "linear_attn.norm", "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias"}
EXPERTS = {f"ffn_{half}_exps": f"mlp.experts.*.{half}_proj" for half in ("gate", "up", "down")}
HALVES = {"gate": "w1", "up": "w3", "down": "w2"}
MIXTRAL_EXPERTS = {f"ffn_{half}_exps": f"block_sparse_moe.experts.*.{name}" for half, name in HALVES.items()}
HYBRID = {**USUAL, **HEAD_NORMS, **LINEAR, "post_attention_norm": "post_attention_layernorm"}
CONVOLUTION = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
LAYER_EMBEDDING = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
EXPERTS_BESIDE = {
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
ALT_UP = {
    **LAYER_EMBEDDING,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_out": "mamba.out_proj",
}
MAMBA = {
    **{f"ssm_{name}": f"mamba.{name}_proj" for name in ("in", "x", "dt", "out")},
    **{f"ssm_{name}_norm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")},
    "ssm_conv1d": "mamba.conv1d",
}
# The FFN of Jamba and Falcon-H1.
FEED_FORWARD = {
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{half}": f"feed_forward.{half}_proj" for half in ("gate", "up", "down")},
}
DELTA = {
    **{f"ssm_{one}_{part}": f"self_attn.{one}_{part}_proj" for one in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
# Each layer is a mixer of some kind.
MIXER = {
    **{name: own.replace("mamba.", "mixer.") for name, own in MAMBA2.items()},
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{f"ffn_{half}_exps": f"mixer.experts.*.{half}_proj" for half in ("up", "down")},
    **{f"ffn_{half}_shexp": f"mixer.shared_experts.{half}_proj" for half in ("up", "down")},
    # The layer that predicts further tokens has attention and experts, with norms of their own.
    **NEXT_TOKENS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
LAYER_EMBEDDINGS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
