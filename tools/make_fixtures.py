"""Writes tests/fixtures: tiny random models of every family and what transformers computes with them.

`make fixtures` runs it in an environment of its own (torch, transformers), because neither the product nor the tests
import those. Weights are not stored: tests/models/seeded_weights.py makes them again from the seed.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.seeded_weights import seeded_weights  # noqa: E402

# transformers has the class, and does not know it as a model of text alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
# It has this one as a model of images, too.
AutoModelForCausalLM.register(Step3p7Config, Step3p7ForConditionalGeneration, exist_ok=True)

FIXTURES = ROOT / "tests" / "fixtures"
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 33, 64, 90)
NUM_GREEDY = 24
MAX_MODEL_LEN = 128
# Two tokens whose logits are closer than this could swap by rounding alone.
MIN_MARGIN = 1e-3
# The most that logits may move when the last bit of each weight is drawn anew: half of what tests allow. With more, the
# order of sums decides whether a test passes. Qwen3-Next moved by 1.8e-4 after two tokens, so jax 0.12 was 1.3e-4 away.
MAX_DRIFT = 5e-5
NUM_DRAWS = 4

# These sizes are odd on purpose: a vocabulary that is no multiple of 128, 7 query heads for 1 KV head, heads of 12.
ODD = {
    "vocab_size": 131,
    "hidden_size": 84,
    "intermediate_size": 116,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
EVEN = {
    "vocab_size": 139,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NO_SPECIAL = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
GEMMA = {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 20, "hidden_size": 48}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {"head_dim": 16, "global_head_dim": 24, "sliding_window": 32}
LONG = [1.0, 1.3, 1.9, 2.6, 3.9, 5.2]
SHORT = [1.0, 1.0, 1.1, 1.1, 1.2, 1.3]

MODEL_TYPES = {
    "Gemma3": "gemma3_text",
    "Gemma3n": "gemma3n_text",
    "Gemma4": "gemma4_text",
    "SeedOss": "seed_oss",
    "GPTNeoX": "gpt_neox",
    "Qwen3_5": "qwen3_5_text",
    "Qwen2Moe": "qwen2_moe",
    "Qwen3Moe": "qwen3_moe",
    "Glm4Moe": "glm4_moe",
    "MiniMaxM2": "minimax_m2",
    "Ernie4_5_Moe": "ernie4_5_moe",
    "GraniteMoe": "granitemoe",
    "Qwen3_5Moe": "qwen3_5_moe_text",
    "DeepseekV2": "deepseek_v2",
    "DeepseekV3": "deepseek_v3",
    "Glm4MoeLite": "glm4_moe_lite",
    "DeepseekV32": "deepseek_v32",
    "GlmMoeDsa": "glm_moe_dsa",
    "GptOss": "gpt_oss",
    "HunYuanDenseV1": "hunyuan_v1_dense",
    "HunYuanMoEV1": "hunyuan_v1_moe",
    "Llama4": "llama4_text",
    "MiMoV2Flash": "mimo_v2_flash",
    "Cohere2Moe": "cohere2_moe",
    "ExaoneMoe": "exaone_moe",
    "HYV3": "hy_v3",
    "SolarOpen": "solar_open",
    "FlexOlmo": "flex_olmo",
    "GPTBigCode": "gpt_bigcode",
    "Qwen3Next": "qwen3_next",
    "Lfm2Moe": "lfm2_moe",
    "NemotronH": "nemotron_h",
    "FalconMamba": "falcon_mamba",
    "FalconH1": "falcon_h1",
    "KimiLinear": "kimi_linear",
    "BailingHybrid": "bailing_hybrid",
    "LongcatFlash": "longcat_flash",
    "GraniteMoeHybrid": "granitemoehybrid",
}

# Seven heads, of sizes that differ in each part.
LATENT = {
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
INDEXED = {
    "hidden_size": 56,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 28,
    "index_n_heads": 12,  # of few heads all may be 0, and transformers breaks ties in another way
    "index_head_dim": 14,
    "index_topk": 11,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

GRANITE4 = {
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 1,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}

FALCON_H1 = {
    **EVEN,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "intermediate_size": 104,
    "rms_norm_eps": 1e-4,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_conv_bias": False,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.2, 1.5],
    "rope_theta": 20_000.0,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 1.1],
    "ssm_out_multiplier": 0.5,
}
MAMBA = {
    "vocab_size": 139,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "state_size": 6,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-4,
}

# Both spellings of a config occur, that of transformers 5 and the older one.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {**EVEN, **EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": ("Qwen2Moe", {**EVEN, **EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2}),
    "mixtral": (
        "Mixtral",
        {**EVEN, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 32},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **EVEN,
            "head_dim": 12,
            "rotary_dim": 6,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            **EVEN,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "moe_layer_interval": 2,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            **EVEN,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **{key: value for key, value in EVEN.items() if key != "intermediate_size"},
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **EVEN,
            **LATENT,
            "hidden_size": 56,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **EVEN,
            **LATENT,
            "q_lora_rank": 28,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    # An index chooses 11 of up to 114 positions.
    "deepseek_v32": ("DeepseekV32", {**EVEN, **LATENT, **INDEXED, "n_group": 3, "topk_group": 2}),
    # GLM-5.2: the last layers read what an earlier one has chosen.
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **EVEN,
            **LATENT,
            **INDEXED,
            "num_hidden_layers": 4,
            "index_topk_pattern": "FFSS",
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **EVEN,
            **LATENT,
            "num_hidden_layers": 3,
            "q_lora_rank": 28,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_interleave": False,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 20_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 16.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "youtu": (
        "Youtu",
        {
            **EVEN,
            **{
                key: value
                for key, value in LATENT.items()
                if "expert" not in key and "rout" not in key and "moe" not in key
            },
            "num_hidden_layers": 3,
            "q_lora_rank": 28,
            "rope_interleave": False,
            "rope_theta": 20_000.0,
            "rms_norm_eps": 1e-4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **EVEN,
            **LATENT,
            "q_lora_rank": 28,
            "rope_interleave": False,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
        },
    ),
    # Released configs have these spellings, and count layers from 1.
    # Ten heads of each kind of attention.
    "bailing_hybrid": (
        "BailingHybrid",
        {
            "vocab_size": 139,
            "hidden_size": 56,
            "intermediate_size": 104,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 6,
            "layer_group_size": 2,
            "short_conv_kernel_size": 3,
            "kda_lower_bound": -3.0,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "max_position_embeddings": 128,
            "moe_intermediate_size": 24,
            "num_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-4,
            "rope_theta": 20_000.0,
        },
    ),
    "longcat_flash": (
        "LongcatFlash",
        {
            "vocab_size": 139,
            "hidden_size": 56,
            "num_layers": 2,
            "num_attention_heads": 7,
            "ffn_hidden_size": 104,
            "q_lora_rank": 44,
            "kv_lora_rank": 36,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "v_head_dim": 10,
            "max_position_embeddings": 128,
            "moe_topk": 4,
            "n_routed_experts": 8,
            "zero_expert_num": 3,
            "expert_ffn_hidden_size": 24,
            "routed_scaling_factor": 0.9,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
        },
    ),
    "step3p7": (
        "Step3p7",
        {
            "architectures": ["Step3p7ForConditionalGeneration"],
            "text_config": {
                **EVEN,
                "intermediate_size": 104,
                "num_hidden_layers": 5,
                "num_attention_heads": 6,
                "num_sliding_attention_heads": 4,
                "head_dim": 16,
                "layer_types": [FULL if kind == "f" else SLIDING for kind in "fssfs"],
                "sliding_window": 24,
                "moe_layers_enum": "1,2,4",
                "n_routed_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "share_expert_dim": 32,
                "moe_router_scaling_factor": 1.7,
                "swiglu_limits": [0.0, 0.0, 0.4, 0.0, 0.7],
                "swiglu_limits_shared": [0.5, 0.0, 0.0, 0.0, 0.6],
                "rope_theta": [20_000.0, 5000.0, 5000.0, 20_000.0, 5000.0],
                "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
                "query_pre_attn_scalar": 20,
                "rms_norm_eps": 1e-4,
                "pad_token_id": 0,
            },
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "mlp_ratio": 2.0,
                "max_position_embeddings": 4,
            },
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "vocab_size": 139,
            "hidden_size": 56,
            "intermediate_size": 100,
            "num_hidden_layers": 4,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "kv_lora_rank": 20,
            "q_lora_rank": None,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "mla_use_nope": True,
            "model_max_length": 128,
            "moe_intermediate_size": 24,
            "moe_renormalize": False,
            "num_experts": 12,
            "num_expert_group": 3,
            "topk_group": 2,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 2,
            "rms_norm_eps": 1e-4,
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "head_dim": 6,
                "num_heads": 8,
                "short_conv_kernel_size": 3,
            },
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **EVEN,
            **EXPERTS,
            "full_attention_interval": 2,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
            "head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            **EVEN,
            "num_hidden_layers": 5,
            "full_attn_idxs": [2, 4],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 12,
            "norm_eps": 1e-4,
            "rope_theta": 20_000.0,
            "tie_embedding": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **EVEN,
            **EXPERTS,
            "intermediate_size": 104,
            "num_dense_layers": 1,
            "layer_types": ["conv", FULL, "conv", FULL],
            "routed_scaling_factor": 1.7,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **EVEN,
            "head_dim": 12,
            "attn_layer_indices": [1, 3],
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-4,
            "rope_theta": 20_000.0,
            "mamba_expand": 3,
            "mamba_n_heads": 12,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **EVEN,
            **GRANITE4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "mamba_proj_bias": True,
            "time_step_limit": [0.2, 1.5],
        },
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        {**EVEN, **GRANITE4, "num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "vocab_size": 139,
            "hidden_size": 48,
            "hybrid_override_pattern": "MEM*EM-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "intermediate_size": 104,
            "ssm_state_size": 10,
            "mamba_num_heads": 12,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "layer_norm_epsilon": 1e-4,
            # Transformers reads the one, and we the other.
            "time_step_min": 0.2,
            "time_step_limit": [0.2, float("inf")],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
            "routed_scaling_factor": 1.7,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "nemotron_h-bias": (
        "NemotronH",
        {
            "vocab_size": 139,
            "hidden_size": 48,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "intermediate_size": 104,
            "ssm_state_size": 10,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "mamba_n_groups": 4,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 1e-6,
        },
    ),
    "falcon_h1": ("FalconH1", {**FALCON_H1, "mamba_norm_before_gate": False}),
    "falcon_h1-norm": (
        "FalconH1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_n_groups": 1,
            "attention_in_multiplier": 1.0,
            "attention_bias": True,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **EVEN,
            "head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "expert_layer_period": 3,
            "expert_layer_offset": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "rms_norm_eps": 1e-4,
        },
    ),
    "mamba": (
        "Mamba",
        {
            **MAMBA,
            "expand": 3,
            "time_step_rank": 5,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_mamba": ("FalconMamba", {**MAMBA, "expand": 5, "intermediate_size": 96, "mixer_rms_eps": 1e-4}),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": 139,
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "expand": 3,
            "num_heads": 12,
            "head_dim": 12,
            "n_groups": 3,
            "state_size": 10,
            "conv_kernel": 3,
            "use_bias": True,
            "layer_norm_epsilon": 1e-4,
            "time_step_limit": [0.2, 1.5],
            "chunk_size": 16,
        },
    ),
    "olmoe": ("Olmoe", {**EVEN, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **EVEN,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **ODD,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.9,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "beta_fast": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "nemotron": (
        "Nemotron",
        {**EVEN, "head_dim": 20, "partial_rotary_factor": 0.6, "norm_eps": 1e-3, "mlp_bias": True},
    ),
    "arcee": ("Arcee", {**EVEN, "head_dim": 20, "rms_norm_eps": 1e-3, "rope_theta": 5000.0}),
    "phi": (
        "Phi",
        {**EVEN, "partial_rotary_factor": 0.34, "qk_layernorm": True, "layer_norm_eps": 1e-3, "hidden_act": "gelu"},
    ),
    # Every length is a short one here: transformers 5.23 takes the short factors for any.
    "phimoe": (
        "Phimoe",
        {
            **EVEN,
            "intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "lm_head_bias": True,
            "original_max_position_embeddings": 128,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": LONG,
                "short_factor": SHORT,
                "long_mscale": 1.4,
                "short_mscale": 1.2,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "dots1": (
        "Dots1",
        {
            **EVEN,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            **EVEN,
            "head_dim": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 7.0, "factor": 1.0},
        },
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {
            **EVEN,
            "head_dim": 16,
            "intermediate_size": 24,
            "num_experts": 5,
            "moe_topk": [3] * 4,
            "attention_bias": True,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            **EVEN,
            **EXPERTS,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 1.7,
            "global_attn_every_n_layers": 2,
            "sliding_window": 24,
            "mup_enabled": True,
            "attention_bias": True,
        },
    ),
    "llama4": (
        "Llama4",
        {
            **EVEN,
            "head_dim": 12,
            "num_hidden_layers": 6,
            "intermediate_size": 24,
            "intermediate_size_mlp": 72,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 32,
            "attn_scale": 0.4,
            "floor_scale": 16,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 20_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mimo_v2": (
        "MiMoV2Flash",
        {
            **EVEN,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 20,
            "attention_value_scale": 0.6,
            "attention_bias": True,
            "sliding_window": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 1e-3,
        },
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {
            **EVEN,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 56,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "logit_scale": 0.5,
        },
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **EVEN,
            **EXPERTS,
            "num_hidden_layers": 5,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "first_k_dense_replace": 2,
            "num_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "hy_v3": (
        "HYV3",
        {
            **EVEN,
            **EXPERTS,
            "head_dim": 20,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "gemma": ("Gemma", {**EVEN, "head_dim": 20, "hidden_act": "gelu", "rms_norm_eps": 1e-3, "rope_theta": 5000.0}),
    "glm": ("Glm", {**EVEN, "head_dim": 20, "partial_rotary_factor": 0.4, "rms_norm_eps": 1e-3}),
    "apertus": (
        "Apertus",
        {
            **EVEN,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 20_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "stablelm": ("StableLm", {**EVEN, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3}),
    "stablelm-12b": (
        "StableLm",
        {**EVEN, "num_attention_heads": 6, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "cohere-plus": ("Cohere", {**EVEN, "num_attention_heads": 6, "logit_scale": 0.5, "use_qk_norm": True}),
    "solar_open": (
        "SolarOpen",
        {
            **{key: value for key, value in EVEN.items() if key != "intermediate_size"},
            "head_dim": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "flex_olmo": ("FlexOlmo", {**EVEN, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmo": ("Olmo", {**EVEN, "clip_qkv": 0.8, "rope_theta": 5000.0}),
    "cwm": (
        "Cwm",
        {**EVEN, "bos_token_id": 1, "num_hidden_layers": 5, "head_dim": 20, "sliding_window": 24, "rms_norm_eps": 1e-3},
    ),
    "internlm3": ("InternLM3", {**EVEN, "head_dim": 20, "qkv_bias": True, "bias": True, "rms_norm_eps": 1e-3}),
    "falcon": (
        "Falcon",
        {
            **{key: value for key, value in EVEN.items() if key not in ("intermediate_size", "num_key_value_heads")},
            "hidden_size": 84,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "ffn_hidden_size": 120,
            "layer_norm_epsilon": 1e-3,
            "bias": True,
        },
    ),
    "falcon-7b": (
        "Falcon",
        {
            **{key: value for key, value in EVEN.items() if key not in ("intermediate_size", "num_key_value_heads")},
            "hidden_size": 84,
            "num_attention_heads": 7,
            "activation": "gelu_new",
        },
    ),
    # Falcon RW. With four heads the products that transformers rounds to bfloat16 are exact.
    "falcon-rw": (
        "Falcon",
        {
            **{key: value for key, value in EVEN.items() if key not in ("intermediate_size", "num_key_value_heads")},
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
            "ffn_hidden_size": 120,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    # Six and seven heads: no powers of two.
    "bloom": (
        "Bloom",
        {
            "vocab_size": 131,
            "hidden_size": 84,
            "n_layer": 3,
            "n_head": 7,
            "layer_norm_epsilon": 1e-3,
            "seq_length": 128,
        },
    ),
    "mpt": (
        "Mpt",
        {
            "vocab_size": 139,
            "d_model": 72,
            "n_layers": 3,
            "n_heads": 6,
            "max_seq_len": 128,
            "layer_norm_epsilon": 1e-3,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3},
        },
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        {
            "vocab_size": 139,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 100,
            "n_positions": 128,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    # More query heads in windowed layers, whose ropes turn the whole of each head.
    "laguna": (
        "Laguna",
        {
            **EVEN,
            **EXPERTS,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "num_attention_heads_per_layer": [4, 6, 6, 4, 6],
            "layer_types": [FULL if kind == "f" else SLIDING for kind in "fssfs"],
            "sliding_window": 24,
            "shared_expert_intermediate_size": 32,
            "moe_routed_scaling_factor": 1.7,
            "moe_router_logit_softcapping": 0.8,
            "attention_bias": True,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "mellum": (
        "Mellum",
        {
            **EVEN,
            **EXPERTS,
            "head_dim": 16,
            "layer_types": [FULL if kind == "f" else SLIDING for kind in "fsfs"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "norm_topk_prob": False,
            "sliding_window": 24,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 20_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            **EVEN,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            "rms_norm_eps": 1e-3,
        },
    ),
    "jais2": ("Jais2", {**EVEN, "head_dim": 20, "layer_norm_eps": 1e-3, "rope_theta": 5000.0}),
    "vaultgemma": (
        "VaultGemma",
        {**EVEN, **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0},
    ),
    "llama": ("Llama", {**ODD, "rms_norm_eps": 1e-5, "rope_theta": 5000.0}),
    "llama-bias": ("Llama", {**EVEN, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-rope": (
        "Llama",
        {
            **EVEN,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 20_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-linear": (
        "Llama",
        {**EVEN, "max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {
            **EVEN,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            **EVEN,
            "rope_theta": 10_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 8.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": ("Mistral", {**EVEN, "sliding_window": 32, "rope_theta": 1e6, "head_dim": 20}),
    "qwen2": (
        "Qwen2",
        {**EVEN, "rope_theta": 1e6, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {**EVEN, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**EVEN, **GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3",
        {
            **EVEN,
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    # Three states, of which layers compute the second, and 8 tokens that the embeddings of layers lack.
    "gemma3n": (
        "Gemma3n",
        {
            **EVEN,
            "intermediate_size": 104,
            "head_dim": 16,
            "sliding_window": 32,
            "num_hidden_layers": 7,
            "layer_types": [FULL if kind == "f" else SLIDING for kind in "sfssfsf"],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 131,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 10,
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.7, 0.0, 0.0],
            "final_logit_softcapping": 3.0,
        },
    ),
    # Layers that read others' keys and values, embeddings of layers, and a wider FFN where layers read.
    "gemma4": (
        "Gemma4",
        {
            **EVEN,
            **GEMMA4,
            "num_hidden_layers": 7,
            "layer_types": [FULL if kind == "f" else SLIDING for kind in "sfssfsf"],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 139,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    # Experts beside a dense FFN, which is wider where a layer reads the keys and values of another.
    "gemma4-experts": (
        "Gemma4",
        {
            **EVEN,
            **GEMMA4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 139,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "rms_norm_eps": 1e-4,
        },
    ),
    # Fewer KV heads in layers of full attention, whose keys are their values.
    "gemma4-keys": (
        "Gemma4",
        {
            **EVEN,
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": [FULL if kind == "f" else SLIDING for kind in "ssfssf"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "phi3": (
        "Phi3",
        {**EVEN, "sliding_window": 48, "rope_theta": 10_000.0, "original_max_position_embeddings": 128},
    ),
    "phi3-longrope": (
        "Phi3",
        {
            **EVEN,
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "longrope", "long_factor": LONG, "short_factor": SHORT},
        },
    ),
    "olmo2": ("Olmo2", {**EVEN, "rms_norm_eps": 1e-6}),
    "olmo3": (
        "Olmo3",
        {
            **EVEN,
            "num_hidden_layers": 5,
            "sliding_window": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 20_000.0,
                    "factor": 4.0,
                    "attention_factor": 1.2,
                    "beta_fast": 8.0,
                    "original_max_position_embeddings": 32,
                },
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            **EVEN,
            "head_dim": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e5,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "glm4": ("Glm4", {**EVEN, "head_dim": 20, "partial_rotary_factor": 0.4, "rms_norm_eps": 1e-3}),
    "cohere": ("Cohere", {**EVEN, "logit_scale": 0.5, "layer_norm_eps": 1e-3, "rope_theta": 5000.0}),
    "cohere2": (
        "Cohere2",
        {**EVEN, "num_hidden_layers": 5, "sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 0.5},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 139,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 100,
            "n_positions": 128,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "opt": (
        "OPT",
        {
            "vocab_size": 131,
            "hidden_size": 84,
            "ffn_dim": 116,
            "num_hidden_layers": 3,
            "num_attention_heads": 7,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        },
    ),
    "exaone4": (
        "Exaone4",
        {**EVEN, "num_hidden_layers": 5, "sliding_window": 24, "sliding_window_pattern": 2, "rms_norm_eps": 1e-3},
    ),
    "seed_oss": ("SeedOss", {**EVEN, "head_dim": 20, "attention_out_bias": True}),
    "starcoder2": ("Starcoder2", {**EVEN, "sliding_window": 24, "norm_epsilon": 1e-3}),
    "ernie4_5": ("Ernie4_5", {**EVEN, "head_dim": 20, "use_bias": True, "rope_theta": 5000.0}),
    "gpt_neox": (
        "GPTNeoX",
        {
            **{key: value for key, value in EVEN.items() if key != "num_key_value_heads"},
            "hidden_size": 64,
            "rotary_pct": 0.5,
            "layer_norm_eps": 1e-3,
        },
    ),
    # Two value heads to a key head, and two layers of attention.
    "qwen3_5": (
        "Qwen3_5",
        {
            **EVEN,
            "num_hidden_layers": 6,
            "layer_types": ["full_attention" if kind == "f" else "linear_attention" for kind in "llflfl"],
            "head_dim": 24,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 20_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 1],
            },
        },
    ),
    "smollm3": ("SmolLM3", {**EVEN, "num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "granite": (
        "Granite",
        {
            **EVEN,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
}


def make(name: str) -> None:
    """Writes one fixture, with the first seed for which the two best tokens are never close to each other.

    Nor may rounding alone move the logits after a prompt by more than MAX_DRIFT.
    """
    family, values = CONFIGS[name]
    directory = FIXTURES / name
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"],
        "model_type": MODEL_TYPES.get(family, family.lower()),
        **values,
        **{key: value for key, value in NO_SPECIAL.items() if key not in values},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    with_offset = (
        "Gemma2",
        "Gemma3",
        "Qwen3_5",
        "Qwen3_5Moe",
        "Qwen3Next",
        "Nemotron",
        "Gemma",
        "VaultGemma",
        "Step3p7",
    )
    norm_offset = 1.0 if family in with_offset else 0.0
    stream = np.random.Generator(np.random.PCG64(len(name)))
    vocab_size = values.get("text_config", values)["vocab_size"]
    prompts = [stream.integers(vocab_size, size=n).tolist() for n in PROMPT_LENGTHS]
    attention = attention_of(family)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), attn_implementation=attention, dtype=torch.float32
    ).eval()
    fix_rope(model)
    shapes = stored_shapes(model)
    for seed in range(100):
        weights = seeded_weights(shapes, seed, norm_offset)
        model = loaded(directory, weights, attention)
        fix_rope(model)
        logits, greedy, margin = expected(model, prompts)
        if margin < MIN_MARGIN:
            continue
        drifts = []
        for draw in range(NUM_DRAWS):
            model = loaded(directory, with_last_bits_drawn(weights, draw), attention)
            fix_rope(model)
            drifts.append(np.abs(after_prompts(model, prompts) - logits).max())
        if max(drifts) <= MAX_DRIFT:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps the best tokens {MIN_MARGIN} apart and drifts {MAX_DRIFT} at most")
    record = {
        "max_model_len": MAX_MODEL_LEN,
        "seed": seed,
        "norm_offset": norm_offset,
        "shapes": shapes,
        "prompts": prompts,
        "greedy": greedy,
    }
    (directory / "expected.json").write_text(json.dumps(record) + "\n")
    np.savez_compressed(directory / "expected.npz", logits=logits)
    distinct = len({token for tokens in greedy for token in tokens})
    margins = f"margin {margin:.4f}, drift {max(drifts):.1e}"
    print(f"{name}: seed {seed}, {margins}, logits {logits.std():.2f}, {distinct} tokens", flush=True)


def with_last_bits_drawn(weights: dict[str, np.ndarray], draw: int) -> dict[str, np.ndarray]:
    """Returns the weights, each a unit of its last bit more or less, or as it was."""
    stream = np.random.Generator(np.random.PCG64(draw))
    return {
        name: (x + np.spacing(x) * stream.integers(-1, 2, x.shape)).astype(np.float32) for name, x in weights.items()
    }


def attention_of(family: str) -> str:
    """Returns the implementation of attention with which transformers computes a family's logits."""
    # SDPA has no soft cap and no sinks, and layers without attention want none of it.
    eager = family.startswith(("Gemma", "VaultGemma", "GptOss", "MiMoV2", "Bloom", "Mpt")) or "Mamba" in family
    return "eager" if eager else "sdpa"


def stored_shapes(model: Any) -> dict[str, list[int]]:
    """Returns the shapes of the tensors of a checkpoint, which transformers may fuse when it reads them."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        [file] = Path(directory).glob("*.safetensors")
        with safe_open(file, "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    # transformers writes the dense FFNs of Kimi Linear with the names of experts, and reads them with those of Kimi.
    dense = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")
    return {dense.sub(r".mlp.\1_proj.", name): shape for name, shape in shapes.items()}


def loaded(config: Path, weights: dict[str, np.ndarray], attention: str) -> Any:
    """Returns the model that transformers reads from a checkpoint with these weights. Each must have its place."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(config / "config.json", directory)
        save_file(weights, Path(directory, "model.safetensors"), {"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=attention, dtype=torch.float32, output_loading_info=True
        )
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def fix_rope(model: Any) -> None:
    """Fixes the rope by MAX_MODEL_LEN, because transformers would otherwise decide for each sequence anew."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return  # the model has learned positions
    if rotary.rope_type in ("dynamic", "longrope"):
        make_frequencies = ROPE_INIT_FUNCTIONS[rotary.rope_type]
        rotary.inv_freq, rotary.attention_scaling = make_frequencies(model.config, seq_len=MAX_MODEL_LEN)
        rotary.rope_type = "default"


@torch.no_grad()  # type: ignore[untyped-decorator]
def after_prompts(model: Any, prompts: list[list[int]]) -> np.ndarray:
    """Returns the logits after each prompt."""
    found = [model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float().numpy() for prompt in prompts]
    return np.stack(found)


@torch.no_grad()  # type: ignore[untyped-decorator]
def expected(model: Any, prompts: list[list[int]]) -> tuple[np.ndarray, list[list[int]], float]:
    """Returns the logits after each prompt, the greedy tokens, and the least distance between two best logits."""
    first, greedy, margin = [], [], float("inf")
    for prompt in prompts:
        tokens = list(prompt)
        for step in range(NUM_GREEDY):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
            if step == 0:
                first.append(logits.numpy())
            best = torch.topk(logits, 2).values
            margin = min(margin, float(best[0] - best[1]))
            if margin < MIN_MARGIN:
                return np.empty(0), [], margin
            tokens.append(int(logits.argmax()))
        greedy.append(tokens[len(prompt) :])
    return np.stack(first), greedy, margin


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes tests/fixtures from transformers.")
    parser.add_argument("names", nargs="*", default=list(CONFIGS), help="fixtures to write; all by default")
    torch.set_num_threads(1)
    for name in parser.parse_args().names:
        make(name)


if __name__ == "__main__":
    main()
