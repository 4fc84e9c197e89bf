"""The architectures of GGUF files, by the names that these have for them."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.gguf_file import GgufFile
from jaxvllm.models.published import gguf_names as names
from jaxvllm.models.published import gguf_own_keys as own_keys
from jaxvllm.models.published import gguf_rebuilt
from jaxvllm.models.published.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from jaxvllm.models.published.gguf_hybrids import FALCON_MAMBA, GRANITE_HYBRID_DENSE, HYBRIDS
from jaxvllm.models.published.gguf_latent import DEEPSEEK_V3, LATENT

_WINDOW_KEY = ("attention.sliding_window",)
_LAYER_NORM = "attention.layer_norm_epsilon"
# By `general.architecture`. Llama 2 and 3, Mistral, SmolLM and others are all `llama`.
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    **HYBRIDS,
    **LATENT,
    "llama": GgufArchitecture("LlamaForCausalLM", names.USUAL, has_turned_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", names.USUAL),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", {**names.USUAL, **names.HEAD_NORMS}),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM",
        {**names.USUAL, **names.HEAD_NORMS, **names.EXPERTS, "ffn_gate_inp": "mlp.gate"},
        own_keys.experts,
        needs=EXPERT_KEYS,
    ),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM",
        {**names.USUAL, **names.EXPERTS, **names.GATED_EXPERT, "ffn_gate_inp": "mlp.gate"},
        own_keys.qwen2_moe,
        needs=(*EXPERT_KEYS, "expert_shared_feed_forward_length"),
    ),
    "gemma": GgufArchitecture("GemmaForCausalLM", names.USUAL, norm_offset=1.0),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        {**names.USUAL, **names.SANDWICH},
        own_keys.gemma2,
        norm_offset=1.0,
        needs=_WINDOW_KEY,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        {**names.USUAL, **names.SANDWICH, **names.HEAD_NORMS},
        own_keys.gemma3,
        norm_offset=1.0,
        needs=_WINDOW_KEY,
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM",
        {**names.USUAL, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        own_keys.phi3,
    ),
    "afmoe": GgufArchitecture(
        "AfmoeForCausalLM",
        {
            **names.USUAL,
            **names.HEAD_NORMS,
            **names.EXPERTS,
            **names.SHARED_EXPERT,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        own_keys.afmoe,
        needs=(*EXPERT_KEYS, "expert_shared_count", "leading_dense_block_count", *_WINDOW_KEY),
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2, "expert_weights_norm": True},
    ),
    "apertus": GgufArchitecture(
        "ApertusForCausalLM",
        {
            **names.USUAL,
            **names.HEAD_NORMS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        numbers={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "arcee": GgufArchitecture("ArceeForCausalLM", names.USUAL, has_turned_heads=True),
    "dots1": GgufArchitecture(
        "Dots1ForCausalLM",
        {
            **names.USUAL,
            **names.HEAD_NORMS,
            **names.EXPERTS,
            **names.SHARED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        own_keys.glm4_moe,
        needs=(*EXPERT_KEYS, "expert_shared_count", "leading_dense_block_count"),
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},
    ),
    "ernie4_5-moe": GgufArchitecture(
        "Ernie4_5_MoeForCausalLM",
        {
            **names.USUAL,
            **names.EXPERTS,
            **names.SHARED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        own_keys.ernie4_5_moe,
        needs=(*EXPERT_KEYS, "expert_shared_count", "interleave_moe_layer_step", "leading_dense_block_count"),
        present={"use_bias": "attn_output.bias"},
    ),
    "exaone4": GgufArchitecture(
        "Exaone4ForCausalLM",
        {**names.USUAL, **names.HEAD_NORMS, **names.SANDWICH},
        own_keys.exaone4,
        refused=("nextn_predict_layers",),  # EXAONE 4.5
    ),
    "exaone-moe": GgufArchitecture(
        "ExaoneMoeForCausalLM",
        {
            **names.USUAL,
            **names.HEAD_NORMS,
            **names.EXPERTS,
            **names.SHARED_EXPERT,
            **names.NEXT_TOKENS,
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.e_score_correction_bias",
        },
        own_keys.exaone_moe,
        needs=(*EXPERT_KEYS, "expert_shared_count", "leading_dense_block_count", *_WINDOW_KEY),
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},
    ),
    "gemma3n": GgufArchitecture(
        "Gemma3nForCausalLM",
        {**names.USUAL, **names.SANDWICH, **names.HEAD_NORMS, **names.ALT_UP},
        own_keys.gemma3n,
        needs=(
            *_WINDOW_KEY,
            "attention.shared_kv_layers",
            "altup.num_inputs",
            "altup.active_idx",
            "embedding_length_per_layer_input",
        ),
        outside={
            **names.LAYER_EMBEDDINGS,
            "altup_proj": "model.altup_projections.*",
            "altup_unembd_proj": "model.altup_unembed_projections.*",
        },
        rows={"vocab_size_per_layer_input": "per_layer_token_embd.weight", "laurel_rank": "blk.0.laurel_l.weight"},
        stack_size=lambda values: values["altup.num_inputs"] - 1,
    ),
    "mistral3": GgufArchitecture(
        "Ministral3ForCausalLM",
        names.USUAL,
        has_turned_heads=True,
        understood=("attention.temperature_scale",),
        steepness=1.0,
    ),
    "nemotron": GgufArchitecture(
        "NemotronForCausalLM", names.USUAL, norm_offset=1.0, norm_epsilon=(_LAYER_NORM, "norm_eps")
    ),
    "hunyuan-moe": GgufArchitecture(
        "HunYuanMoEV1ForCausalLM",
        {
            **names.USUAL,
            **names.EXPERTS,
            **{f"ffn_{half}_shexp": f"mlp.shared_mlp.{half}_proj" for half in ("gate", "up", "down")},
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
        },
        own_keys.hunyuan_moe,
        needs=(*EXPERT_KEYS, "expert_shared_count"),
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", names.USUAL, present={"use_bias": "attn_output.bias"}),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        {
            **names.USUAL,
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
            **names.USUAL,
            **names.HEAD_NORMS,
            **names.EXPERTS,
            **names.SHARED_EXPERT,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **names.NEXT_TOKENS,
        },
        own_keys.glm4_moe,
        needs=(*EXPERT_KEYS, "expert_shared_count", "leading_dense_block_count"),
        present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        understood=("expert_weights_scale",),
        usual_values={"expert_gating_func": 2},  # a sigmoid
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        {
            **names.USUAL,
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
        own_keys.gpt_oss,
        needs=(*EXPERT_KEYS[:2], *_WINDOW_KEY),
        present={"attention_bias": "attn_q.bias"},
        usual_values={"expert_gating_func": 3},  # a softmax over the chosen experts
        turned=("experts.gate_up_proj", "experts.down_proj"),
        rope_parameters={"truncate": False},
    ),
    "granite": GgufArchitecture(
        "GraniteForCausalLM",
        names.USUAL,
        own_keys.granite,
        has_turned_heads=True,
        understood=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    ),
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        {
            **names.USUAL,
            **names.SANDWICH,
            **names.HEAD_NORMS,
            **names.LAYER_EMBEDDING,
            **names.EXPERTS_BESIDE,
            "layer_output_scale.weight": "layer_scalar",
        },
        own_keys.gemma4,
        needs=(
            *_WINDOW_KEY,
            "attention.key_length",
            "attention.key_length_swa",
            "attention.shared_kv_layers",
            "embedding_length_per_layer_input",
        ),
        lacks=("feed_forward_length",),
        outside=names.LAYER_EMBEDDINGS,
    ),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM",
        {
            **names.USUAL,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.output_linear",
        },
        lambda values: {**own_keys.granite(values), **own_keys.mixtral(values)},
        has_turned_heads=True,
        needs=EXPERT_KEYS[:2],
        understood=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
        rebuilt=gguf_rebuilt.GRANITE_MOE,
    ),
    "hunyuan-dense": GgufArchitecture(
        "HunYuanDenseV1ForCausalLM",
        {**names.USUAL, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "command-r": GgufArchitecture(
        "CohereForCausalLM",
        {**names.USUAL, **names.HEAD_NORMS},
        lambda values: {"logit_scale": values["logit_scale"]},
        needs=("logit_scale",),
        present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        understood=("logit_scale",),
        norm_epsilon=(_LAYER_NORM, "layer_norm_eps"),
    ),
    "cohere2": GgufArchitecture(
        "Cohere2ForCausalLM",
        names.USUAL,
        own_keys.cohere2,
        needs=("logit_scale", *_WINDOW_KEY),
        present={"attention_bias": "attn_q.bias"},
        understood=("logit_scale",),
        norm_epsilon=(_LAYER_NORM, "layer_norm_eps"),
    ),
    "llama4": GgufArchitecture(
        "Llama4ForCausalLM",
        {
            **{name: own.replace("mlp.", "feed_forward.") for name, own in names.USUAL.items()},
            **{name: own.replace("mlp.", "feed_forward.") for name, own in names.GATED_EXPERT.items()},
            "ffn_gate_inp": "feed_forward.router",
        },
        own_keys.llama4,
        needs=(*EXPERT_KEYS, "interleave_moe_layer_step"),
        usual_values={"expert_gating_func": 2, "attention.sliding_window": 8192},
        refused=("leading_dense_block_count",),
        rebuilt=gguf_rebuilt.LLAMA4,
    ),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM",
        {
            **names.USUAL,
            **names.HEAD_NORMS,
            **names.MIXTRAL_EXPERTS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        own_keys.mixtral,
        needs=EXPERT_KEYS[:2],
        usual_values={"expert_gating_func": 2},
    ),
    "olmoe": GgufArchitecture(
        "OlmoeForCausalLM",
        {**names.USUAL, **names.HEAD_NORMS, **names.EXPERTS, "ffn_gate_inp": "mlp.gate"},
        own_keys.olmoe,
        needs=EXPERT_KEYS[:2],
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", {**names.USUAL, **names.HEAD_NORMS, **names.SANDWICH}),
    "seed_oss": GgufArchitecture(
        "SeedOssForCausalLM",
        {**names.USUAL, "post_attention_norm": "post_attention_layernorm"},
        present={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"},
    ),
    # Files do not say that there is a window, which all published models have.
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM",
        {**names.USUAL, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        lambda _: {"sliding_window": 4096},
        present={"use_bias": "attn_output.bias"},
        norm_epsilon=(_LAYER_NORM, "norm_epsilon"),
    ),
    # Files do not say which layers have no positions: llama.cpp takes every fourth, as all published models do.
    "smollm3": GgufArchitecture(
        "SmolLM3ForCausalLM", names.USUAL, lambda _: {"no_rope_layer_interval": 4}, has_turned_heads=True
    ),
}
_MIXTRAL = GgufArchitecture(
    "MixtralForCausalLM",
    {**names.USUAL, **names.MIXTRAL_EXPERTS, "ffn_gate_inp": "block_sparse_moe.gate"},
    own_keys.mixtral,
    has_turned_heads=True,
    needs=EXPERT_KEYS[:2],
)
_BESIDE_VISION = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
_OLMO3 = replace(ARCHITECTURES["olmo2"], family="Olmo3ForCausalLM", own_keys=own_keys.olmo3)
# These are in the config, as the scaling of the rope.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """Returns the architecture of a file and its name. Raises ValueError that names one that is not known."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in {**ARCHITECTURES, **_BESIDE_VISION}:
        raise ValueError(
            f"{file.path} has general.architecture {name!r}, which is not supported in GGUF: supported are "
            f"{', '.join((*ARCHITECTURES, *_BESIDE_VISION))}. Take the model's checkpoint in safetensors"
        )
    # Some models are another one beside a vision tower, which is in a file of its own. The axes of a text's positions
    # are all the same.
    if name in _BESIDE_VISION:
        return name, ARCHITECTURES[_BESIDE_VISION[name]]
    # Some names are those of two families.
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return name, _MIXTRAL
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return name, _OLMO3
    if name == "deepseek2" and file.metadata.get("deepseek2.expert_gating_func", 1) != 1:
        return name, DEEPSEEK_V3
    if name == "mamba" and file.metadata.get("mamba.ssm.dt_b_c_rms"):
        return name, FALCON_MAMBA
    if name == "granitehybrid" and not file.metadata.get("granitehybrid.expert_count"):
        return name, GRANITE_HYBRID_DENSE
    if name == "mistral3" and not file.metadata.get("mistral3.attention.temperature_scale"):
        return name, ARCHITECTURES["llama"]
    return name, ARCHITECTURES[name]
