"""Writes GGUF files of our fixtures and tokenizers, as llama.cpp's converter does."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from jaxvllm.models.published.gguf_codes import STORED_TYPES
from tests.models.fixture import Fixture

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    # Its own name is newer than the package, and its tensors have the names of GLM's.
    "DeepseekV32ForCausalLM": gguf.MODEL_ARCH.GLM_DSA,
    "GlmMoeDsaForCausalLM": gguf.MODEL_ARCH.GLM_DSA,
    "KimiLinearForCausalLM": gguf.MODEL_ARCH.KIMI_LINEAR,
    "MambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "FalconMambaForCausalLM": gguf.MODEL_ARCH.MAMBA,
    "Mamba2ForCausalLM": gguf.MODEL_ARCH.MAMBA2,
    "JambaForCausalLM": gguf.MODEL_ARCH.JAMBA,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "ApertusForCausalLM": gguf.MODEL_ARCH.APERTUS,
    "Llama4ForCausalLM": gguf.MODEL_ARCH.LLAMA4,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "Dots1ForCausalLM": gguf.MODEL_ARCH.DOTS1,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "Gemma3nForCausalLM": gguf.MODEL_ARCH.GEMMA3N,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "NemotronForCausalLM": gguf.MODEL_ARCH.NEMOTRON,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "HunYuanDenseV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
}
_ARCH = gguf.MODEL_ARCH
TURNED = {
    _ARCH.LLAMA,
    _ARCH.ARCEE,
    _ARCH.GRANITE,
    _ARCH.GRANITE_MOE,
    _ARCH.GRANITE_HYBRID,
    _ARCH.MISTRAL3,
    _ARCH.SMOLLM3,
}
# Norms are stored with 1 added.
MOVED = {_ARCH.GEMMA, _ARCH.GEMMA2, _ARCH.GEMMA3, _ARCH.QWEN3NEXT, _ARCH.QWEN35, _ARCH.QWEN35MOE, _ARCH.NEMOTRON}
Choice = Callable[[str], Kind]


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    kind_of: Choice = lambda _: Kind.F32,
    *,
    architecture: gguf.MODEL_ARCH | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Writes a model of Hugging Face's tensors, and returns the values that these have after they were rounded.

    kind_of: the type of each tensor, by its name in the file
    architecture: another name for the model than the usual one
    extra: tensors that only the file has
    """
    architecture = architecture or ARCHITECTURES[config["architectures"][0]]
    is_newer = config["architectures"][0] == "DeepseekV32ForCausalLM"
    writer = gguf.GGUFWriter(path, "deepseek32" if is_newer else gguf.MODEL_ARCH_NAMES[architecture], **options)
    _add_config(writer, config)
    more(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    rounded: dict[str, np.ndarray] = {}
    for name, parts in _stacked(weights).items():
        own = names.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), (".weight", ".bias"))
        assert own is not None, name
        change, back = _changes(architecture, name, config)
        data = change(np.stack(list(parts.values())) if len(parts) > 1 else next(iter(parts.values())))
        kind = kind_of(own) if data.ndim > 1 and "norm" not in own else Kind.F32
        stored = quantized(np.ascontiguousarray(data), kind)
        writer.add_tensor(own, stored, raw_dtype=kind)
        values = back(gguf.quants.dequantize(stored.view(np.uint8), kind).reshape(data.shape))
        rounded |= dict(zip(parts, values if len(parts) > 1 else [values], strict=True))
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


def quantized(data: np.ndarray, kind: Kind) -> np.ndarray:
    """What a file has of a tensor, or random blocks about as large, of a type to which the package rounds nothing."""
    try:
        return gguf.quants.quantize(data, kind)
    except NotImplementedError:
        rows, blocks = data.size // data.shape[-1], data.shape[-1] // gguf.GGML_QUANT_SIZES[kind][0]
        unit = np.std(gguf.quants.dequantize(random_blocks(kind, rows, blocks), kind))
        return random_blocks(kind, rows, blocks, 1e-2 * data.std() / unit).reshape(*data.shape[:-1], -1)


def random_blocks(kind: Kind, rows: int, blocks: int, largest: float = 1e-2) -> np.ndarray:
    """Rows of blocks whose scales are finite, u8[rows, bytes]. The largest scale is about that of a whole block."""
    size, own = gguf.GGML_QUANT_SIZES[kind][1], STORED_TYPES[kind]
    stream = np.random.default_rng(int(kind))
    data = stream.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    if kind == Kind.IQ1_M:  # whose scale has four bits in each of the last four words
        halves = stream.uniform(-largest, largest, (rows, blocks, 1)).astype(np.float16).view(np.uint16)
        words = np.ascontiguousarray(data[..., 48:]).view(np.uint16)
        parts = (halves >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
        data[..., 48:] = (words & 0xFFF | parts).view(np.uint8)
    elif kind == Kind.MXFP4:
        data[..., 0] = int(np.log2(largest)) + stream.integers(123, 129, (rows, blocks))
    elif kind == Kind.NVFP4:  # of positive numbers, none of which is a NaN
        data[..., :4] = stream.integers(1, 0x78, (rows, blocks, 4))
    else:
        for place in (own.scale, own.min):
            if isinstance(place, int):
                halves = stream.uniform(-largest, largest, (rows, blocks, 1)).astype(np.float16)
                data[..., place : place + 2] = halves.view(np.uint8)
    return data.reshape(rows, -1)


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim", hidden // max(heads, 1))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if heads:  # others keep states alone
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_rope_dimension_count(int(head_size * config.get("partial_rotary_factor", 1)))
    if heads and "head_dim" in config:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    for key, add in (
        ("num_experts", writer.add_expert_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("n_routed_experts", writer.add_expert_count),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("interleave_moe_layer_step", writer.add_interleave_moe_layer_step),
        ("linear_conv_kernel_dim", writer.add_ssm_conv_kernel),
        ("linear_num_key_heads", writer.add_ssm_group_count),
        ("linear_key_head_dim", writer.add_ssm_state_size),
        ("linear_num_value_heads", writer.add_ssm_time_step_rank),
        ("kv_lora_rank", writer.add_kv_lora_rank),
        ("norm_eps", writer.add_layer_norm_eps),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("route_scale", writer.add_expert_weights_scale),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("moe_shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("moe_latent_size", writer.add_moe_latent_size),
        ("moe_num_experts", writer.add_expert_count),
        ("moe_k", writer.add_expert_used_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("conv_L_cache", writer.add_shortconv_l_cache),
        ("altup_num_inputs", writer.add_altup_num_inputs),
        ("altup_active_idx", writer.add_altup_active_idx),
        ("hidden_size_per_layer_input", writer.add_embedding_length_per_layer_input),
        ("num_kv_shared_layers", writer.add_shared_kv_layers),
        ("q_lora_rank", writer.add_q_lora_rank),
        ("index_n_heads", writer.add_indexer_head_count),
        ("index_head_dim", writer.add_indexer_key_length),
        ("index_topk", writer.add_indexer_top_k),
    ):
        if config.get(key) is not None:
            add(config[key])


def gpt_oss_in_file(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of gpt-oss with gate and up apart and matrices [out, in], as the converter has them."""
    found: dict[str, np.ndarray] = {}
    for name, data in weights.items():
        start, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        turned = data.swapaxes(-1, -2) if ".experts." in name and kind == "weight" else data
        if start.endswith("gate_up_proj"):
            for first, half in enumerate(("gate", "up")):
                found[f"{start.removesuffix('gate_up_proj')}{half}_proj.{kind}"] = turned[:, first::2]
        else:
            found[f"{start}.{kind}" if name.endswith(("sinks", "down_proj", "down_proj_bias")) else name] = turned
    return found


def gpt_oss_of_file(values: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `gpt_oss_in_file` was made of, with other values."""
    found: dict[str, np.ndarray] = {}
    for name, data in like.items():
        found[name] = np.empty_like(data)
        for own, view in gpt_oss_in_file({name: found[name]}).items():
            view[...] = values[own]
    return found


def _stacked(weights: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The tensors by name, where all experts of a layer are one."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdecimal() else -1 for part in name.split(".")]):
        data = weights[name]
        start, experts, rest = name.partition(".experts.")
        number, _, end = rest.partition(".")
        own = f"{start}{experts}{end}" if number.isdecimal() else name
        found.setdefault(own, {})[name] = data
    return found


def _changes(
    architecture: gguf.MODEL_ARCH, name: str, config: Mapping[str, Any]
) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """What is done to a tensor before it is stored, and what undoes it."""
    module, _, kind = name.rpartition(".")
    if architecture in TURNED and module.endswith(("q_proj", "k_proj")):
        count = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
        count = max(count) if isinstance(count, list) else count
        return (
            lambda x: x.reshape(count, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape),
            lambda x: x.reshape(count, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape),
        )
    if architecture in MOVED and name.endswith("norm.weight") and "linear_attn" not in name:
        return (lambda x: x + 1, lambda x: x - 1)
    return (lambda x: x, lambda x: x)


def demo_tokenizer(directory: Path) -> Callable[[gguf.GGUFWriter], None]:
    """Adds the tokenizer of a directory, byte-level BPE that cuts off digits, as the converter does."""
    written = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    model, added = written["model"], {token["content"]: token for token in written["added_tokens"]}
    vocabulary = model["vocab"] | {content: token["id"] for content, token in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = gguf.TokenType
    kinds = [
        types.NORMAL if token not in added else types.CONTROL if added[token]["special"] else types.USER_DEFINED
        for token in tokens
    ]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(vocabulary[config["bos_token"]])
        writer.add_eos_token_id(vocabulary[config["eos_token"]])
        writer.add_pad_token_id(vocabulary[config["pad_token"]])
        writer.add_add_bos_token(True)
        writer.add_chat_template(config["chat_template"])

    return add


def sized(fixture: Fixture, **config: Any) -> dict[str, Any]:
    """The config of a fixture with what the converter finds in every config."""
    found = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0} | fixture.config | config
    # Files have numbers in float32.
    return {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in found.items()}
