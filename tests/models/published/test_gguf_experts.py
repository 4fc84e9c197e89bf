"""Experts of GGUF files in K-quants and MXFP4 are kept, and mean what the package gguf makes of their blocks."""

from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.qwen3 import qwen3_moe, random_weights
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.cpu_groups import CpuGroups
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.host import host_chip
from tests.gguf_files import gpt_oss_in_file, sized, write_gguf
from tests.models.dense import dense_logits
from tests.models.published import test_gguf_codes, test_stored_bits
from tests.models.published.test_mxfp4 import gpt_oss
from tests.models.published.test_stored_bits import check_panels, kept, load, values
from tests.models.published.written import resized, write_model

CONFIG = qwen3_moe(3, 256, 256, 4, 2, 4, 2, 64, 64, max_position_embeddings=64, rope_theta=1e4, torch_dtype="float32")
# Of each layer: gates, features, and what takes them back. The last layer has gates and features of two kinds.
KINDS = ((Kind.Q4_K, Kind.Q4_K, Kind.Q6_K), (Kind.Q5_K, Kind.Q5_K, Kind.Q2_K), (Kind.Q3_K, Kind.Q4_K, Kind.IQ4_XS))
BY_TILE = Forms(stored=FewBitsForms(by_tile=True))
BY_KERNEL = Forms(stored=FewBitsForms(Backend("cpu", host_chip()), True))


def kind_of(name: str) -> Kind:
    block, number, tensor = (*name.split(".", 2), "", "")[:3]
    halves = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
    return KINDS[int(number)][halves.index(tensor)] if block == "blk" and tensor in halves else Kind.F32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file, and a checkpoint of the values that NumPy decodes of it."""
    directory = tmp_path_factory.mktemp("experts")
    decoded = write_gguf(directory / "model.gguf", CONFIG, dict(random_weights(CONFIG)), kind_of)
    return directory / "model.gguf", write_model(directory / "plain", CONFIG, decoded)


def test_experts_in_k_quants_are_kept_and_answer_as_decoded(models: tuple[Path, Path]) -> None:
    file, plain = models
    spec = model_spec(checkpoint.read_config(file))
    expected, params, ours = load(plain, Forms()), load(file, BY_TILE), load(file, BY_KERNEL)
    numbers = jax.tree.map(np.asarray, expected)
    for found, decoded in ((params, test_gguf_codes.decoded), (ours, values)):
        # Gates and features lie in one stack, which is decoded where a file has them in two ways.
        assert [kept({"layers": [layer]}) for layer in found["layers"]] == [
            {"experts_gate_up", "experts_down"},
            {"experts_gate_up", "experts_down"},
            {"experts_down"},
        ]
        chex.assert_trees_all_equal(
            jax.tree.map(decoded, found, is_leaf=lambda node: isinstance(node, Matrix)), numbers
        )
    assert all(isinstance(layer["experts_down"].form, CpuGroups) for layer in ours["layers"])
    tokens = [5, 6, 7, 60, 1, 5]
    exact, logits, rounded = (
        jax.jit(lambda tree: dense_logits(tree, spec, tokens))(one) for one in (expected, params, ours)
    )
    chex.assert_trees_all_close(logits, exact, atol=2e-5, rtol=1e-5)
    # Our kernel rounds tokens to eight bits.
    assert np.abs(rounded - exact).max() < 0.02 * np.abs(exact).max()


def test_devices_share_experts_in_k_quants_out(models: tuple[Path, Path]) -> None:
    file, plain = models
    params = load(file, BY_TILE, size=2)
    assert "experts_gate_up" in kept(params)
    chex.assert_trees_all_equal(
        jax.tree.map(test_gguf_codes.decoded, params, is_leaf=lambda node: isinstance(node, Matrix)),
        jax.tree.map(np.asarray, load(plain, Forms(), size=2)),
    )


def test_experts_of_gpt_oss_in_mxfp4_are_kept(tmp_path: Path) -> None:
    """Gates and features are tensors of their own in the file, whose rows take turns in those of Hugging Face."""
    fixture, path = resized(gpt_oss(), {72: 96, 24: 32}, head_dim=16), tmp_path / "model.gguf"
    config = sized(fixture) | {"rope_theta": 5000.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    weights = gpt_oss_in_file(fixture.weights())
    write_gguf(path, config, weights, lambda name: Kind.MXFP4 if name.endswith("_exps.weight") else Kind.F32)
    for size in (1, 2):
        params = load(path, size=size)
        assert kept(params) == {"experts_gate_up", "experts_down"}
        assert params["layers"][0]["experts_gate_up"].arrays["scales"].dtype == np.uint8
        chex.assert_trees_all_equal(
            test_stored_bits.decoded(params), test_stored_bits.decoded(load(path, Forms(), size))
        )
    check_panels(path)


def test_tensors_in_nvfp4_are_multiplied_by_their_factors(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 1}
    factors = {"blk.0.attn_output": [0.25], "blk.0.ffn_down_exps": [0.5, 2.0, 1.0, 3.0]}
    extra = {f"{name}.scale": np.array(values, np.float32) for name, values in factors.items()}
    extra["blk.0.ffn_down_exps.input_scale"] = np.ones(4, np.float32)
    stored = write_gguf(
        tmp_path / "model.gguf",
        config,
        dict(random_weights(config)),
        lambda name: Kind.NVFP4 if name.removesuffix(".weight") in factors else Kind.F32,
        extra=extra,
    )
    stored["model.layers.0.self_attn.o_proj.weight"] *= np.float32(0.25)
    for number, factor in enumerate(factors["blk.0.ffn_down_exps"]):
        stored[f"model.layers.0.mlp.experts.{number}.down_proj.weight"] *= np.float32(factor)
    expected = test_stored_bits.decoded(load(write_model(tmp_path / "plain", config, stored), Forms()))
    for forms in (Forms(), BY_TILE, BY_KERNEL):
        params = load(tmp_path / "model.gguf", forms)
        assert kept(params) == ({"o", "experts_down"} if forms.stored else set())
        chex.assert_trees_all_equal(test_stored_bits.decoded(params), expected)
