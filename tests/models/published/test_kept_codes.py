"""Codes that need more than scales and zeros are kept, too: they mean what the checkpoint means, and multiply so."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.cpu_decoded import CpuDecoded
from jaxvllm.models.forms.cpu_groups import CodeTable
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.published import published_encoding
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_forms import expected_forms
from jaxvllm.planner.share import Share
from pallas_kernels.quantized_matmul.code import FP4, NF4, Code
from tests.models.fixture import Fixture
from tests.models.published.test_bitsandbytes import FOUR, four_bits
from tests.models.published.test_mlx import random_tensors
from tests.models.published.test_stored_bits import (
    CASES,
    PANELS,
    ROWS,
    TILES,
    check_panels,
    decoded,
    gptq,
    kept,
    load,
    of_projections,
    qwen,
)
from tests.models.published.written import resized, write_model
from tests.pallas_kernels.code_panels import rounded

ALL = {"qkv", "o", "gate_up", "down"}


def fixture_of_64() -> Fixture:
    return resized(Fixture.load("qwen3"), {48: 64, 100: 128}, hidden_size=64, intermediate_size=128)


def check_tiles(params: Any, plain: Any) -> None:
    """The products of all matrices with unit vectors are their columns, exactly."""
    for layer, exact in zip(params["layers"], plain["layers"], strict=True):
        for name in kept(params) & layer.keys():
            node, matrix = layer[name], np.asarray(exact[name])
            product = jax.jit(lambda x, arrays, form: form.product(x, arrays, None), static_argnums=2)
            columns = product(jnp.eye(matrix.shape[-1]), node.arrays, node.form)
            np.testing.assert_array_equal(np.moveaxis(np.asarray(columns), 0, -1), matrix)


def num_bytes(params: Any) -> int:
    """The bytes of the matrices that are kept."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Matrix))
    return sum(array.nbytes for node in nodes if isinstance(node, Matrix) for array in node.arrays.values())


def stored_bytes(path: Path) -> int:
    """The bytes of all that the file has of the projections."""
    with (path / "model.safetensors").open("rb") as file:
        tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    ends = [of["data_offsets"] for name, of in tensors.items() if "_proj." in name]
    return sum(end - begin for begin, end in ends)


def check_plan(path: Path, params: Any, forms: Forms = TILES) -> None:
    """A plan, and an engine with random weights, have the arrays that the files have, by the config alone."""
    config = checkpoint.read_config(path)
    spec, encoding = model_spec(config), published_encoding(config)
    assert encoding is not None
    chex.assert_trees_all_equal_shapes_and_dtypes(load(path, forms, load_format="dummy"), params)
    expected = replace(forms, own=expected_forms(encoding, Spread(spec), jnp.float32, forms))
    share = Share(Spread(spec), jnp.dtype("float32"), expected)
    assert share.weight_bytes == sum(array.nbytes for array in jax.tree.leaves(params))


def mlx(directory: Path, bits: int, group: int) -> Path:
    """A model whose matrices, and whose embedding, MLX has quantized."""
    fixture, tensors = fixture_of_64(), {}
    for name, weight in fixture.weights().items():
        if weight.ndim != 2:
            tensors[name] = weight
            continue
        made, _ = random_tensors(bits, group, *weight.shape)
        own = name.removesuffix(".weight")
        for stored, array in made.items():
            as_stored = array.astype(jnp.bfloat16) if array.dtype == np.float16 else array
            tensors[own + stored.removeprefix("x_proj")] = as_stored
    return write_model(directory, fixture.config | {"quantization": {"bits": bits, "group_size": group}}, tensors)


@pytest.mark.parametrize(("bits", "group"), [(3, 64), (4, 64), (5, 32), (8, 32)])
def test_integers_with_a_bias_are_kept(bits: int, group: int, tmp_path: Path) -> None:
    path = mlx(tmp_path, bits, group)
    params, plain = load(path), load(path, Forms())
    assert kept(params) == ALL
    assert num_bytes(params) == stored_bytes(path) or bits == 3  # which becomes four
    check_tiles(params, plain)
    check_panels(path)
    by_kernel = load(path, PANELS)
    table = by_kernel["embed"]
    assert isinstance(table.form, CodeTable)
    np.testing.assert_array_equal(table.form.look_up(table.arrays, jnp.arange(7)), plain["embed"][:7])
    check_plan(path, by_kernel, PANELS)


def bitsandbytes(directory: Path, code: Code, *, nested: bool) -> Path:
    """A model whose projections are numbers of a table, with two blocks in each row at least."""
    sizes = {16: 32, 32: 64, 48: 128, 64: 128, 100: 256}
    fixture = resized(Fixture.load("qwen3"), sizes, hidden_size=128, intermediate_size=256, head_dim=32)
    tensors = {}
    for name, weight in fixture.weights().items():
        if weight.ndim == 2 and "_proj" in name:
            made, _ = four_bits((weight.shape[0], weight.shape[1]), nested=nested, kind=code.name, code=code)
            tensors |= {name + stored.removeprefix("x_proj.weight"): array for stored, array in made.items()}
        else:
            tensors[name] = weight
    settings = FOUR | {"bnb_4bit_quant_type": code.name}
    return write_model(directory, fixture.config | {"quantization_config": settings}, tensors)


@pytest.mark.parametrize(("code", "nested"), [(NF4, True), (FP4, False)])
def test_numbers_of_a_table_are_kept(code: Code, nested: bool, tmp_path: Path) -> None:
    path = bitsandbytes(tmp_path, code, nested=nested)
    params, plain = load(path), load(path, Forms())
    assert kept(params) == ALL
    assert {params["layers"][0][name].form.code for name in ALL} == {code}
    assert num_bytes(params) < 1.1 * stored_bytes(path)
    check_tiles(params, plain)
    check_plan(path, params)
    check_panels(path, CpuDecoded)
    # Devices have parts of them, and where XLA would write a copy in each step they are decoded once.
    shared = load(path, size=2)
    assert kept(shared) == ALL
    chex.assert_trees_all_equal(decoded(shared), decoded(load(path, Forms(), size=2)))
    assert not kept(load(path, ROWS))


def test_the_values_of_bitsandbytes() -> None:
    """NF4's are quantiles of a normal distribution, as `create_normal_map` of bitsandbytes computes them."""
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    numbers = np.sort([*above, 0.0, *below]) / max(above)
    np.testing.assert_allclose(NF4.table[:16], numbers, rtol=0, atol=2e-7)
    # A sign, and sizes of which the largest is 1.
    sizes = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
    np.testing.assert_allclose(FP4.table[:16], [*sizes, *-sizes], rtol=1e-6)


@pytest.mark.parametrize("code", [NF4, FP4])
def test_new_weights_are_the_nearest_of_a_table(code: Code) -> None:
    weights = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
    form = ScaledGroups(code, 64, "float32")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = form.keep(jnp.asarray(weights), dict.fromkeys(("codes", "scales"), place))
    largest = np.abs(weights).reshape(6, 2, 64).max(-1)
    np.testing.assert_allclose(arrays["scales"], largest, rtol=1e-6)
    exact = weights / np.repeat(np.asarray(arrays["scales"]), 64, -1)
    numbers = code.table[:16]
    nearest = numbers[np.abs(exact[..., None] - numbers).argmin(-1)]
    np.testing.assert_array_equal(code.numbers(arrays["codes"]), nearest)


def test_groups_in_no_order_are_kept_in_another_order_of_inputs(tmp_path: Path) -> None:
    settings = CASES["gptq"][0] | {"desc_act": True}

    def parts(shape: tuple[int, int], seed: int, order_seed: int | None = None) -> dict[str, np.ndarray]:
        usual = gptq(shape, seed)
        stream = np.random.default_rng(shape[1] if order_seed is None else order_seed)
        return usual | {"g_idx": stream.permutation(usual["g_idx"])}

    path = of_projections(tmp_path / "alike", qwen(), settings, parts)
    params, plain = load(path), load(path, Forms())
    assert kept(params) == ALL
    check_tiles(params, plain)
    orders = sum(params["layers"][0][name].arrays["order"].nbytes for name in ALL) * len(params["layers"])
    assert num_bytes(params) - orders < 1.05 * stored_bytes(path)
    check_plan(path, params)
    # Where devices have parts of the inputs they are decoded, and so are they in stacks of layers.
    shared = load(path, size=2)
    assert kept(shared) == {"qkv", "gate_up"}
    check_tiles(shared, plain)
    assert not kept(load(path, ROWS))
    # The kernel for CPUs gets tokens in that order, of the layer that a step computes.
    by_kernel = load(path, PANELS)["layers"]
    x = np.random.default_rng(0).standard_normal((3, 48), np.float32)
    node, exact = by_kernel[1]["gate_up"], np.asarray(plain["layers"][1]["gate_up"], np.float64)
    order = np.asarray(node.arrays["order"])
    assert (np.sort(order) == np.arange(48)).all() and (order != np.arange(48)).any()
    tokens = np.zeros((3, 48))
    tokens[:, order] = rounded(x[:, order], 16)
    expected = np.einsum("ti,...i->t...", tokens, exact)
    both = [layer["gate_up"].arrays for layer in by_kernel[:2]]
    y = jax.jit(lambda x, both, i: node.form.product_with_one(x, both, i, None))(x, both, 1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    gated = jax.jit(lambda x, both, i: node.form.gated_product(x, both, i, "silu"))(x, both, 1)
    np.testing.assert_allclose(gated, jax.nn.silu(y[:, 0]) * y[:, 1], rtol=1e-4, atol=1e-5)
    # New weights have the order in which they are.
    weights, decl = jnp.asarray(exact, jnp.float32), ParamDecl(exact.shape, (None,) * 3, storage="matrix")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = node.form.keep(weights, dict.fromkeys(node.form.declare(decl), place))
    assert {name: array.shape for name, array in arrays.items()} == {name: a.shape for name, a in node.arrays.items()}
    np.testing.assert_array_equal(arrays["order"], np.arange(48))
    # Gate and up have an order each: both are decoded, as are groups of several sizes.
    path = of_projections(tmp_path / "apart", qwen(), settings, lambda shape, seed: parts(shape, seed, seed))
    assert kept(load(path)) == {"qkv", "o", "down"}
    uneven = {"g_idx": np.repeat(np.arange(2, dtype=np.int32), (20, 28))}
    others = ("down_proj.weight", "o_proj.weight")  # which have other inputs
    path = of_projections(tmp_path / "uneven", qwen(), settings, lambda *of: gptq(*of) | uneven, others)
    assert not kept(load(path))
