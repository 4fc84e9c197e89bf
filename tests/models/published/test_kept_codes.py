"""Codes that need more than scales and zeros are kept, too: they mean what the checkpoint means, and multiply so."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.cpu_groups import CodeTable
from jaxvllm.models.published import published_encoding
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_forms import expected_forms
from jaxvllm.planner.share import Share
from tests.models.fixture import Fixture
from tests.models.published.test_mlx import random_tensors
from tests.models.published.test_stored_bits import PANELS, TILES, check_panels, kept, load
from tests.models.published.written import resized, write_model

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
    """The bytes of the tensors of the layers that are no vectors."""
    with (path / "model.safetensors").open("rb") as file:
        tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    ends = [of["data_offsets"] for name, of in tensors.items() if ".layers." in name and len(of["shape"]) > 1]
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
