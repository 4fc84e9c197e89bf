"""Damaged checkpoints with experts: each is an error that names what does not fit, before any weight is read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.models.families import model_spec
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.safetensors_files import INDEX, SINGLE
from tests.models.fixture import Fixture

type Weights = dict[str, np.ndarray]

# A tensor of the last expert, or of all, and the key of the number of experts.
FAMILIES = {
    "qwen3_moe": ("model.layers.2.mlp.experts.5.down_proj.weight", "num_experts"),
    "mixtral": ("model.layers.1.block_sparse_moe.experts.4.w1.weight", "num_local_experts"),
    "deepseek_v3": ("model.layers.3.mlp.experts.11.up_proj.weight", "n_routed_experts"),
    "gpt_oss": ("model.layers.1.mlp.experts.gate_up_proj", "num_local_experts"),
    "granitemoe": ("model.layers.1.block_sparse_moe.output_linear.weight", "num_local_experts"),
    "llama4": ("model.layers.1.feed_forward.experts.down_proj", "num_local_experts"),
    "longcat_flash": ("model.layers.1.mlp.experts.7.down_proj.weight", "n_routed_experts"),
    "nemotron_h": ("backbone.layers.1.mixer.experts.5.up_proj.weight", "n_routed_experts"),
    "gemma4-experts": ("model.layers.1.experts.gate_up_proj", "num_experts"),
    "ernie4_5_moe": ("model.layers.1.mlp.experts.5.gate_proj.weight", "moe_num_experts"),
}
OF_EXPERTS = r"(lacks the|unexpected|: ) ?tensor \S*(mlp|moe|feed_forward|mixer|experts|router)\.\S+"


def opened(directory: Path, config: dict[str, Any], weights: Weights) -> StoredWeights:
    save_file(weights, directory / SINGLE)
    return StoredWeights.open(directory, config, model_spec(config))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_expert_that_does_not_fit(name: str, tmp_path: Path) -> None:
    fixture, (tensor, key) = Fixture.load(name), FAMILIES[name]
    config, whole = fixture.config, fixture.weights()
    opened(tmp_path, config, whole)
    with pytest.raises(ValueError, match=f"{tmp_path} lacks the tensor {tensor}, which should have shape"):
        opened(tmp_path, config, {other: array for other, array in whole.items() if other != tensor})
    for wrong in (whole[tensor][..., :-1], whole[tensor].swapaxes(-1, -2), whole[tensor][:-1], whole[tensor][None]):
        if wrong.shape != whole[tensor].shape:
            with pytest.raises(ValueError, match=f"{tmp_path / SINGLE}: tensor {tensor} has shape .*the config makes"):
                opened(tmp_path, config, whole | {tensor: np.ascontiguousarray(wrong)})
    step = config.get("n_group", 1)  # which must divide
    for count in (config[key] - step, config[key] + step):
        with pytest.raises(ValueError, match=OF_EXPERTS):
            opened(tmp_path, config | {key: count}, whole)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=f"{tmp_path / SINGLE} is not a complete safetensors file"):
        StoredWeights.open(tmp_path, config, model_spec(config))


def moved(weights: Weights, old: str, new: str) -> Weights:
    return {name.replace(old, new): array for name, array in weights.items()}


@pytest.mark.parametrize(
    ("name", "options", "edit", "message"),
    [
        (
            "qwen3_moe",
            {},
            lambda w: moved(w, "2.mlp.experts.3", "2.mlp.experts.6"),
            r"lacks the tensor \S+experts.3.\S+",
        ),
        ("qwen3_moe", {}, lambda w: w | moved(w, "experts.0", "experts.6"), r"unexpected tensor \S+experts.6.\S+ and"),
        ("qwen3_moe", {}, lambda w: moved(w, "2.mlp.gate.", "2.mlp.gates."), r"lacks the tensor \S+.2.mlp.gate.weight"),
        ("qwen3_moe", {"mlp_only_layers": [1, 2]}, dict, r"lacks the tensor \S+layers.2.mlp.down_proj.weight"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 23},
            dict,
            r"tensor \S+experts.0.gate_proj.weight has shape \(24, 48\)",
        ),
        ("qwen3_moe", {"num_experts_per_tok": 7}, dict, "7 of 6 experts cannot be chosen"),
        ("deepseek_v3", {"n_group": 5}, dict, "12 experts.*5 groups|n_group"),
        ("deepseek_v3", {"n_shared_experts": 1}, dict, r"tensor \S+shared_experts.\S+ has shape"),
        ("deepseek_v3", {}, lambda w: moved(w, "gate.e_score_", "gate.score_"), r"lacks the tensor \S+e_score_\S+"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, dict, r"lacks the tensor \S+layers.2.mlp.down_proj.weight"),
        # One expert less, and one more that returns its input: the router's shape is the same.
        (
            "longcat_flash",
            {"n_routed_experts": 7, "zero_expert_num": 4},
            dict,
            r"unexpected tensor \S+experts.7.down_\S+",
        ),
        ("gpt_oss", {}, lambda w: moved(w, "1.mlp.experts.down_proj_bias", "x"), r"lacks the tensor \S+down_proj_bias"),
    ],
)
def test_experts_of_another_config(
    name: str, options: dict[str, Any], edit: Callable[[Weights], Weights], message: str, tmp_path: Path
) -> None:
    fixture = Fixture.load(name)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, fixture.config | options, edit(fixture.weights()))


def test_an_expert_of_a_dtype_that_needs_scales(tmp_path: Path) -> None:
    fixture, (tensor, _) = Fixture.load("qwen3_moe"), FAMILIES["qwen3_moe"]
    whole = fixture.weights()
    with pytest.raises(ValueError, match=f"{SINGLE}: tensor {tensor} has dtype I8: supported are"):
        opened(tmp_path, fixture.config, whole | {tensor: whole[tensor].astype(np.int8)})


def test_a_shard_of_experts(tmp_path: Path) -> None:
    fixture, (tensor, _) = Fixture.load("qwen3_moe"), FAMILIES["qwen3_moe"]
    whole, spec = fixture.weights(), model_spec(fixture.config)
    shards = {"a.safetensors": {n: w for n, w in whole.items() if "experts" not in n}}
    shards |= {"b.safetensors": {n: w for n, w in whole.items() if "experts" in n}}
    for file, held in shards.items():
        save_file(held, tmp_path / file)
    index = {name: file for file, held in shards.items() for name in held}

    def refused(message: str, **told: str) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": index | told}))
        with pytest.raises(ValueError, match=message):
            StoredWeights.open(tmp_path, fixture.config, spec)

    refused(f"{INDEX} says that a.safetensors holds {re.escape(tensor)}, and it does not", **{tensor: "a.safetensors"})
    refused(f"{INDEX} names the shard c.safetensors, which is not there", **{tensor: "c.safetensors"})
    data = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[:-1])
    refused(r"b.safetensors is not a complete safetensors file")
    save_file({n: w for n, w in shards["b.safetensors"].items() if n != tensor}, tmp_path / "b.safetensors")
    refused(f"{INDEX} says that b.safetensors holds {re.escape(tensor)}, and it does not")
