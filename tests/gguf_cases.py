"""Models of our fixtures, and what llama.cpp's converter does to their tensors and configs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.gguf_files import sized, write_gguf
from tests.models.fixture import Fixture

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, and what the converter does to a tensor: it gives tensors by their names in a layer, or None."""

    fixture: str
    in_file: Callable[[str, np.ndarray, Config], Tensors | None]
    changes: Mapping[str, Any]
    stated: Mapping[str, Any] = field(default_factory=dict)  # what the converter writes instead
    more: Callable[[gguf.GGUFWriter, Config], None] = lambda *_: None
    folded: Callable[[str, np.ndarray, Config], np.ndarray] = lambda _, data, __: (
        data
    )  # with what the config multiplies


def latent(name: str, data: np.ndarray, config: Config) -> Tensors | None:
    if not name.endswith("kv_b_proj.weight"):
        return None
    size = config["qk_nope_head_dim"]
    by_head = data.reshape(config["num_attention_heads"], -1, data.shape[1])
    return {"attn_k_b.weight": by_head[:, :size].swapaxes(1, 2), "attn_v_b.weight": by_head[:, size:]}


def add_latent(writer: gguf.GGUFWriter, config: Config) -> None:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    scores = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(scores.SOFTMAX if "V2" in config["architectures"][0] else scores.SIGMOID)
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def add_next_layer(writer: gguf.GGUFWriter, config: Config, *norms: str) -> None:
    """Adds a layer that predicts further tokens, which is passed over."""
    count = config["num_hidden_layers"]
    writer.add_nextn_predict_layers(1)
    [block_count] = (value for key, value in writer.kv_data[0].items() if key.endswith(".block_count"))
    block_count.value = count + 1
    of_next = [f"nextn.{name}" for name in ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_norm")]
    for name in (*of_next, *norms, "attn_norm", "ffn_norm", "ffn_gate_inp"):
        writer.add_tensor(f"blk.{count}.{name}.weight", np.ones((2, 2), np.float32))


def add_latent_before_next(writer: gguf.GGUFWriter, config: Config) -> None:
    add_latent(writer, config)
    add_next_layer(writer, config)


def llama4(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    if name.endswith("experts.down_proj"):
        return {"ffn_down_exps.weight": data.swapaxes(1, 2)}
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(data.swapaxes(1, 2), 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    return None


def add_llama4(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def granite_moe(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    if name.endswith("input_linear.weight"):
        gate, up = np.split(data, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    return None


def qwen2_moe(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    return {"ffn_gate_inp_shexp.weight": data[0]} if name.endswith("shared_expert_gate.weight") else None


def qwen3_next(name: str, data: np.ndarray, config: Config) -> Tensors | None:
    _, _, own = name.partition("linear_attn.")
    K, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // K * config["linear_value_head_dim"]
    match own:
        case "in_proj_qkvz.weight":
            ends = np.cumsum((key_size, key_size, of_values))
            kinds = [part.reshape(-1, data.shape[1]) for part in np.split(data.reshape(K, -1, data.shape[1]), ends, 1)]
            return {"attn_qkv.weight": np.concatenate(kinds[:3]), "attn_gate.weight": kinds[3]}
        case "conv1d.weight":
            return {"ssm_conv1d.weight": data[:, 0]}
        case "dt_bias":
            return {"ssm_dt.bias": data}
        case "A_log":
            return {"ssm_a": -np.exp(data)}
    return qwen2_moe(name, data, config)


def qwen3_5(name: str, data: np.ndarray, config: Config) -> Tensors | None:
    _, _, own = name.partition("linear_attn.")
    K, key_size, size = (config[f"linear_{key}"] for key in ("num_key_heads", "key_head_dim", "value_head_dim"))

    def tiled(values: np.ndarray, width: int, axis: int = 0) -> np.ndarray:
        moved = np.moveaxis(values, axis, 0)
        by_head = moved.reshape(K, -1, width, *moved.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(by_head.reshape(moved.shape), 0, axis)

    def after_keys(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[: 2 * K * key_size], tiled(values[2 * K * key_size :], size)])

    match own:
        case "in_proj_qkv.weight":
            return {"attn_qkv.weight": after_keys(data)}
        case "conv1d.weight":
            return {"ssm_conv1d.weight": after_keys(data[:, 0])}
        case "in_proj_z.weight":
            return {"attn_gate.weight": tiled(data, size)}
        case "in_proj_a.weight":
            return {"ssm_alpha.weight": tiled(data, 1)}
        case "in_proj_b.weight":
            return {"ssm_beta.weight": tiled(data, 1)}
        case "out_proj.weight":
            return {"ssm_out.weight": tiled(data, size, axis=1)}
        case "dt_bias":
            return {"ssm_dt.bias": tiled(data, 1)}
        case "A_log":
            return {"ssm_a": -np.exp(tiled(data, 1))}
    return qwen2_moe(name, data, config)


def add_linear(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["full_attention_interval"])


def ernie(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    return {"exp_probs_b.bias": data[0]} if name.endswith("correction_bias") else None


def add_ernie(writer: gguf.GGUFWriter, _: Config) -> None:
    writer.add_leading_dense_block_count(1)


def add_hunyuan(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_used_count(config["moe_topk"][0])
    writer.add_expert_shared_count(1)


def lfm2(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    return {"shortconv.conv.weight": data[:, 0]} if name.endswith("conv.conv.weight") else None


def gemma3n(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    for ours, own in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        if f".{ours}." in name:
            return {f"{own}.weight": data[None]}
    return {"altup_correct_scale.weight": data} if name.endswith("correct_output_scale") else None


def add_gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    pattern = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -np.inf for share in pattern])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def lfm2_moe(name: str, data: np.ndarray, config: Config) -> Tensors | None:
    for half, own in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        if ".experts." in name and name.endswith(f"{own}.weight"):
            return {f"ffn_{half}_exps.weight": data[None]}
    return {"exp_probs_b.bias": data} if name.endswith("expert_bias") else lfm2(name, data, config)


def afmoe(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    return {"exp_probs_b.bias": data} if name.endswith("expert_bias") else None


def add_sigmoid(writer: gguf.GGUFWriter, _: Config) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def mamba2(name: str, data: np.ndarray, config: Config) -> Tensors | None:
    """Mamba-2 in a hybrid, and the shared FFN of Granite."""
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    start, _, own = name.rpartition("mamba." if ".mamba." in name else "mixer.")
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(data, 2)
        end = "_shexp" if config["num_local_experts"] else ""
        return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight"):
        return {f"ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight": data}
    match own if start else "":
        case "A_log":
            return {"ssm_a": -np.exp(data)[:, None]}
        case "D":
            return {"ssm_d": data[:, None]}
        case "dt_bias":
            return {"ssm_dt.bias": data}
        case "norm.weight":
            return {"ssm_norm.weight": data.reshape(groups, -1)}
        case "conv1d.weight":
            return {"ssm_conv1d.weight": data[:, 0]}
        case "gate.e_score_correction_bias":
            return {"exp_probs_b.bias": data}
    if (found := granite_moe(name, data, config)) is not None:
        return found
    for half in ("up", "down"):
        if ".mixer.experts." in name and name.endswith(f"{half}_proj.weight"):
            return {f"ffn_{half}_exps.weight": data[None]}
    return None


def add_granite_hybrid(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["mamba_n_heads"]
    writer.add_ssm_inner_size(heads * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", 4))
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")


def add_nemotron_h(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["mamba_num_heads"]
    writer.add_ssm_inner_size(heads * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_expert_shared_count(1)
    add_next_layer(writer, config, "post_attention_norm", "attn_q")


def add_mamba2(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["num_heads"]
    writer.add_feed_forward_length(0)
    writer.add_ssm_group_count(config["n_groups"])
    add_scan(writer, heads * config["head_dim"], heads, config["state_size"], config["conv_kernel"])


def mamba(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    """Mamba in any model."""
    if name.endswith("A_log"):
        return {"ssm_a": -np.exp(data)}
    return {"ssm_conv1d.weight": data[:, 0]} if name.endswith("conv1d.weight") else None


def add_scan(writer: gguf.GGUFWriter, width: int, rank: int, state: int, kernel: int) -> None:
    writer.add_ssm_inner_size(width)
    writer.add_ssm_time_step_rank(rank)
    writer.add_ssm_state_size(state)
    writer.add_ssm_conv_kernel(kernel)


def add_mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    hidden, is_falcon = config["hidden_size"], config["model_type"] == "falcon_mamba"
    width, rank = (config["intermediate_size"], hidden // 16) if is_falcon else (3 * hidden, config["time_step_rank"])
    writer.add_feed_forward_length(0)
    writer.add_ssm_dt_b_c_rms(is_falcon)
    add_scan(writer, width, rank, config["state_size"], config["conv_kernel"])


def add_jamba(writer: gguf.GGUFWriter, config: Config) -> None:
    add_scan(
        writer, 2 * config["hidden_size"], config["mamba_dt_rank"], config["mamba_d_state"], config["mamba_d_conv"]
    )


def folded(name: str, data: np.ndarray, config: Config) -> np.ndarray:
    """A weight of Falcon-H1 times its multipliers, which files do not have."""
    gates, x, b, c, steps = config["ssm_multipliers"]
    width, of_groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (width, width, of_groups, of_groups, config["mamba_n_heads"])
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors: dict[str, Any] = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * np.repeat((gates, x, b, c, steps), sizes)[:, None],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    return data * np.float32(factors.get(name.split(".")[-2], 1))


def add_falcon_h1(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["mamba_n_heads"]
    writer.add_ssm_group_count(config["mamba_n_groups"])
    add_scan(writer, config["mamba_d_ssm"], heads, config["mamba_d_state"], config["mamba_d_conv"])


def apertus(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    return {} if ".act_fn." in name else None


def add_apertus(writer: gguf.GGUFWriter, config: Config) -> None:
    weights = Fixture.load("apertus").weights()
    for number in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [weights[f"model.layers.{n}.mlp.act_fn.{number}"].item() for n in range(config["num_hidden_layers"])]
        writer.add_array(f"xielu.{number}", values)


def kimi_linear(name: str, data: np.ndarray, config: Config) -> Tensors | None:
    _, _, own = name.partition("self_attn.")
    if own.endswith("conv1d.weight"):
        # Quantized files have one axis less.
        return {f"ssm_conv1d_{own[0]}.weight": data[None] if own[0] == "q" else data}
    if own == "A_log":
        return {"ssm_a": -np.exp(data)}
    return {"ssm_dt.bias": data} if own == "dt_bias" else latent(name, data, config)


def add_kimi_linear(writer: gguf.GGUFWriter, config: Config) -> None:
    add_latent(writer, config)
    del writer.kv_data[0]["kimi-linear.attention.value_length"]
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_ssm_conv_kernel(config["linear_attn_config"]["short_conv_kernel_size"])
    writer.add_kda_head_dim(config["linear_attn_config"]["head_dim"])


def add_glm_dsa(writer: gguf.GGUFWriter, config: Config) -> None:
    add_latent_before_next(writer, config)
    writer.add_array("glm-dsa.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])


NO_LIMIT = {"time_step_limit": None, "time_step_min": None}
# Of models without attention the converter writes an arbitrary length, and no heads.
STATES = {"num_attention_heads": 0, "max_position_embeddings": 2**20, "rms_norm_eps": 1e-4}
PLAIN = {
    **{f"{key}_multiplier": 1.0 for key in ("lm_head", "embedding", "key", "attention_in", "attention_out")},
    **{f"ssm_{key}_multiplier": 1.0 for key in ("in", "out")},
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
    "mamba_norm_before_gate": False,
    "time_step_limit": None,
}
ONE_GROUP = {"num_expert_group": 1, "topk_group": 1, "moe_renormalize": True}
SOME_INDEXED = {"index_topk_pattern": None, "indexer_types": ["full", "full", "shared", "shared"]}
SHORT = {"rms_norm_eps": 1e-5, "conv_L_cache": 3}
WITHOUT_LAST = {"num_hidden_layers": 6, "hybrid_override_pattern": "MEM*EM"}
NEMOTRON = {
    "num_key_value_heads": [0, 0, 0, 2, 0, 0],
    "intermediate_size": [0, 104, 0, 0, 104, 0],
    "rms_norm_eps": 1e-4,
}


def gemma4(name: str, data: np.ndarray, _: Config) -> Tensors | None:
    names = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    return next(({own: data} for end, own in names.items() if name.endswith(end)), None)


def add_gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_key_length_swa(16)
    writer.add_value_length_swa(16)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 3 + [1e30] * 9, np.float32))
    if "num_kv_shared_layers" not in config:
        writer.add_shared_kv_layers(0)
    if "top_k_experts" in config:
        writer.add_expert_used_count(config["top_k_experts"])


FULL = {"head_dim": 24, "rope_theta": 1e6}
FLAT = {"rope_theta": 20_000.0, "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "floor_scale": 8192}
STEEP = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7}
LINEAR = {"rope_parameters": None, "partial_rotary_factor": 0.25}
EVERY_THIRD = {"full_attention_interval": 3, "linear_conv_kernel_dim": 4}
CASES = (
    Case("deepseek_v2", latent, {}, more=add_latent),
    Case("deepseek_v3", latent, {"rope_scaling": STEEP, "norm_topk_prob": True}, more=add_latent_before_next),
    Case("afmoe", afmoe, {"global_attn_every_n_layers": 4, "rms_norm_eps": 1e-5}, more=add_sigmoid),
    Case("exaone_moe", lambda *_: None, {"sliding_window_pattern": 4, "norm_topk_prob": True}, more=add_sigmoid),
    Case("ernie4_5_moe", ernie, {}, more=add_ernie),
    Case("gemma3n", gemma3n, {}, {"intermediate_size": [104] * 7}, add_gemma3n),
    Case("gemma4", gemma4, {}, {**FULL, "intermediate_size": [100] * 4 + [200] * 3}, add_gemma4),
    Case("gemma4-experts", gemma4, {}, {**FULL, "intermediate_size": [100] * 3 + [200]}, add_gemma4),
    Case("gemma4-keys", gemma4, {}, {**FULL, "num_key_value_heads": [2, 2, 1, 2, 2, 1]}, add_gemma4),
    Case("granitemoehybrid", mamba2, NO_LIMIT, {"num_key_value_heads": [0, 2, 0, 2]}, add_granite_hybrid),
    Case("granitemoehybrid-dense", mamba2, {}, {"num_key_value_heads": [0, 2, 0, 2]}, add_granite_hybrid),
    Case("lfm2_moe", lfm2_moe, {"norm_eps": 1e-5}, {"num_key_value_heads": [0, 2, 0, 2], **SHORT}, add_sigmoid),
    Case("nemotron_h", mamba2, NO_LIMIT | WITHOUT_LAST, NEMOTRON, add_nemotron_h),
    Case("mamba2", mamba2, NO_LIMIT, STATES, add_mamba2),
    Case("mamba", mamba, {}, STATES, add_mamba),
    Case("falcon_mamba", mamba, {"mixer_rms_eps": None}, STATES, add_mamba),
    Case("jamba", mamba, {}, {"num_key_value_heads": [0, 2, 0, 2]}, add_jamba),
    Case("falcon_h1", mamba2, PLAIN, {}, add_falcon_h1, folded),
    Case("falcon_h1-norm", mamba2, PLAIN, {}, add_falcon_h1, folded),
    Case("apertus", apertus, {"rope_parameters": {"rope_type": "default"}}, {}, add_apertus),
    Case(
        "kimi_linear",
        kimi_linear,
        ONE_GROUP,
        {"max_position_embeddings": 128, "num_key_value_heads": [0, 1, 0, 1]},
        add_kimi_linear,
    ),
    Case("deepseek_v32", latent, {"norm_topk_prob": True}, more=add_latent_before_next),
    Case("glm_moe_dsa", latent, {"norm_topk_prob": True, **SOME_INDEXED}, more=add_glm_dsa),
    Case("hunyuan_moe", lambda *_: None, {}, more=add_hunyuan),
    Case("lfm2", lfm2, {}, {"intermediate_size": 96, "num_key_value_heads": [0, 0, 2, 0, 2], "rms_norm_eps": 1e-4}),
    Case("llama4", llama4, {"rope_parameters": None, "attn_scale": None, **FLAT}, more=add_llama4),
    Case("granitemoe", granite_moe, {}),
    Case("qwen2_moe", qwen2_moe, {"decoder_sparse_step": 1}),
    Case("qwen3_next", qwen3_next, {"norm_topk_prob": True, "mlp_only_layers": [], **LINEAR}, more=add_linear),
    Case("qwen3_5", qwen3_5, {"layer_types": None, "num_hidden_layers": 3, **EVERY_THIRD, **LINEAR}, more=add_linear),
    Case(
        "qwen3_5_moe", qwen3_5, {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, **LINEAR}, more=add_linear
    ),
)


def as_converted(fixture: Fixture, num_layers: int) -> Fixture:
    """The first layers, of which all have experts if one has: files of Qwen have no other ones."""
    shapes = fixture.shapes
    with_experts = next((name.split(".")[2] for name in shapes if ".mlp.experts." in name), None)
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        start, _, rest = name.partition(".layers.")
        number, _, own = rest.partition(".")
        if not rest:
            found[name] = shape
        elif int(number) < num_layers and (with_experts is None or not own.startswith("mlp.")):
            found[name] = shape
        elif number == with_experts:
            found |= {f"{start}.layers.{layer}.{own}": shape for layer in range(num_layers)}
    return replace(fixture, shapes=found)


def written(case: Case, fixture: Fixture, config: Config, path: Path) -> dict[str, np.ndarray]:
    """Writes the file, and returns the tensors that it stands for."""
    usual: dict[str, np.ndarray] = {}
    kept: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for name, whole in fixture.weights().items():
        data = case.folded(name, whole, fixture.config)
        own = case.in_file(name, data, config)
        if own is None:
            usual[name] = data
            continue
        start = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        for end, part in own.items():
            parts.setdefault(start + end, []).append(part)
        kept[name] = np.log(np.exp(data)) if name.endswith("A_log") else data
    extra = {name: np.concatenate(own) for name, own in parts.items()}  # of stacks there are several parts
    stated = {**config, **case.stated}
    rounded = write_gguf(
        path, stated, usual, lambda _: Kind.BF16, extra=extra, more=lambda writer: case.more(writer, stated)
    )
    return rounded | kept


def as_written(case: Case) -> tuple[Fixture, dict[str, Any]]:
    """The fixture that is written, and its config."""
    fixture = Fixture.load(case.fixture)
    if case.fixture.startswith(("qwen", "nemotron")):
        fixture = as_converted(fixture, case.changes.get("num_hidden_layers", fixture.config.get("num_hidden_layers")))
    config = {
        key: value for key, value in sized(fixture, **case.changes).items() if case.changes.get(key, 0) is not None
    }
    return fixture, config
