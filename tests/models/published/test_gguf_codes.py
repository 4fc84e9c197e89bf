"""What GGUF files store in blocks is kept: its arrays mean what the package gguf reads, and multiply accordingly."""

import tracemalloc
from pathlib import Path
from typing import Any

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.qwen3_gguf import write_q4_k_m
from jaxvllm.models import checkpoint
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix, few_bits, scaled_groups
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.cpu_groups import CodeTable, CpuGroups
from jaxvllm.models.forms.few_bits import FewBits, StoredAs
from jaxvllm.models.forms.in_parts import InParts
from jaxvllm.models.forms.nested_groups import NestedGroups
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.ops import look_up
from jaxvllm.models.published import encoded_files
from jaxvllm.models.published.gguf_blocks import BlockType
from jaxvllm.models.published.gguf_codes import STORED_TYPES
from jaxvllm.models.published.mxfp4 import STORED_MXFP4
from jaxvllm.models.published.nvfp4 import STORED_NVFP4
from jaxvllm.models.published.stored_codes import StoredCodes
from jaxvllm.models.tiling import Box
from jaxvllm.models.weight_names import Source
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.integer_matmul.decoded_rows import decoded_rows
from pallas_kernels.quantized_matmul import decoded as decoded_matrix
from pallas_kernels.quantized_matmul.code import IQ1, IQ2, IQ3_S, IQ3_XXS, IQ4, UINT4, UINT6, Code
from tests.gguf_files import random_blocks
from tests.models.dense import dense_logits
from tests.models.published.test_stored_bits import load
from tests.pallas_kernels.code_panels import matrix as panels_matrix

# Layers 0 and 1 have values and down projections in Q4_K, and layers 2 and 3 in Q6_K.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 400,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
BY_TILE = Forms(stored=FewBitsForms(by_tile=True))


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_q4_k_m(path, CONFIG)
    return path


def decoded_arrays(form: NestedGroups, arrays: dict[str, jax.Array]) -> np.ndarray:
    """The matrix of these arrays, by what the form says in words."""
    held = {name: np.asarray(array) for name, array in arrays.items()}
    codes = np.stack([held["codes"] & 15, held["codes"] >> 4], -1).reshape(*held["codes"].shape[:-1], -1)
    if form.code.number_table is not None:
        codes = form.code.table[codes]
    if (bits := form.code.bits - 4) > 0:
        every = np.unpackbits(held["high"], axis=-1, bitorder="little").reshape(*codes.shape, bits)
        codes += ((every << np.arange(bits, dtype=np.uint8)).sum(-1) << 4).astype(np.uint8)
    size = codes.shape[-1]

    def of_elements(name: str) -> Any:
        found = held[name].astype(np.float32) if name in held else np.ones((1,), np.float32)
        return np.repeat(found, size // found.shape[-1], -1)

    scaled = (codes - np.float32(0 if form.has_mins else form.code.zero)) * (
        of_elements("scales") * of_elements("factors")
    )
    return scaled - of_elements("mins") * of_elements("min_factors") if form.has_mins else scaled


def decoded(node: Any) -> np.ndarray:
    if not isinstance(node, Matrix):
        return np.asarray(node)
    if isinstance(node.form, NestedGroups):
        return decoded_arrays(node.form, node.arrays)
    assert isinstance(node.form, InParts)
    parts = []
    for number, (_, form) in enumerate(node.form.parts):
        assert isinstance(form, NestedGroups)
        own = {name[2:]: array for name, array in node.arrays.items() if name[0] == str(number)}
        parts.append(decoded_arrays(form, own))
    return np.concatenate(parts, node.form.axis)


def filled(form: FewBits, matrix: ParamDecl, stored: StoredCodes) -> dict[str, jax.Array]:
    """The arrays of a matrix that is stored so."""
    arrays = {}
    for name, decl in form.declare(matrix).items():
        array = np.zeros(decl.shape, decl.dtype_in("float32"))
        form.fills(matrix, stored.elements)[name](array, (0,) * array.ndim)
        arrays[name] = jnp.asarray(array)
    return arrays


@pytest.mark.parametrize("kind", [Kind(number) for number in STORED_TYPES], ids=lambda kind: kind.name)
def test_what_a_block_has_of_each_number(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_groups, "_TILE", 4 * 512)  # four rows at a time
    blocks = 512 // STORED_TYPES[kind].count
    data = random_blocks(kind, 6, blocks)
    # The package does not decode Q1_0. What we decode is compared with its bits elsewhere.
    expected = BlockType.of(int(kind), "x").decode(data, np.float32)
    if kind != Kind.Q1_0:
        np.testing.assert_array_equal(expected, gguf.quants.dequantize(data, kind))
    part = STORED_TYPES[kind].part(data)
    for start, shape in (((0, 0), (6, 512)), ((2, 3), (2, 300)), ((5, 100), (1, 7))):
        np.testing.assert_array_equal(part(Box(start, shape)), expected[Box(start, shape).index((0, 0))])
    # The same numbers in arrays, and their products.
    stored = StoredCodes(((Source("x", (6, 512), (0, 0), (6, 512)), part),))
    way = stored.stored_as(512)
    assert way is not None
    # What safetensors have of these types is the same, so that GPUs and TPUs have the same forms.
    assert way == {Kind.MXFP4: STORED_MXFP4, Kind.NVFP4: STORED_NVFP4}.get(kind, way)
    form = FewBitsForms(by_tile=True).of(way, way.group)
    matrix = ParamDecl((6, 512), (None, None), storage="matrix")
    assert form is not None
    arrays = filled(form, matrix, stored)
    if isinstance(form, NestedGroups):  # Q4_0 and Q8_0 have scales alone
        np.testing.assert_array_equal(decoded_arrays(form, arrays), expected)
        bits = 8 * sum(array.nbytes for array in arrays.values()) / expected.size
        assert bits <= form.code.bits + (1.125 if form.has_mins else 0.5625)
    x = np.random.default_rng(0).normal(size=(3, 512)).astype(np.float32)
    y = jax.jit(lambda x, arrays: form.product(x, arrays, None))(x, arrays)
    np.testing.assert_allclose(y, x @ expected.T, rtol=1e-5, atol=1e-4)
    # Our kernel rounds tokens, and integers up to 127 are what they are.
    ours = FewBitsForms(Backend("cpu", host_chip()), True).of(way, way.group)
    assert ours is not None
    ours = ours.of_matrix(matrix)
    assert isinstance(ours, CpuGroups)
    integers = np.random.default_rng(0).integers(-127, 128, (3, 512)).astype(np.float32)
    integers[:, ::16] = 127
    y = jax.jit(lambda x, arrays: ours.product(x, arrays, None))(integers, filled(ours, matrix, stored))
    np.testing.assert_allclose(y, integers @ expected.T, rtol=1e-5, atol=1e-2)
    if (table := ours.of_table(matrix, "float32")) is not None:
        arrays = filled(table, matrix, stored)
        rows = jax.jit(lambda arrays, numbers: table.look_up(arrays, numbers))(arrays, np.array([5, 1], np.int32))
        np.testing.assert_array_equal(rows, expected[[5, 1]])


def test_layers_of_q4_k_m_are_kept_and_answer_as_decoded(q4_k_m: Path) -> None:
    spec = model_spec(checkpoint.read_config(q4_k_m))
    params, plain = load(q4_k_m, BY_TILE), load(q4_k_m, Forms())
    codes = [
        [[form.code for _, form in layer["qkv"].form.parts] if isinstance(layer["qkv"].form, InParts) else []]
        + [layer["down"].form.code]
        for layer in params["layers"]
    ]
    assert codes == [[[], UINT4], [[], UINT4], [[UINT4, UINT6], UINT6], [[UINT4, UINT6], UINT6]]
    chex.assert_trees_all_equal(
        jax.tree.map(decoded, params, is_leaf=lambda node: isinstance(node, Matrix)), jax.tree.map(np.asarray, plain)
    )
    by_kernel = load(q4_k_m, Forms(stored=FewBitsForms(Backend("cpu", host_chip()), True)))
    assert isinstance(by_kernel["layers"][0]["gate_up"].form, CpuGroups)
    assert isinstance(by_kernel["embed"].form, CodeTable)
    trees = (params, plain, by_kernel)
    logits, expected, ours = (jax.jit(lambda tree: dense_logits(tree, spec, [5, 6, 7]))(one) for one in trees)
    chex.assert_trees_all_close(logits, expected, atol=2e-5, rtol=1e-5)
    # The embedding is the LM head, too. Its rows are looked up, and numbers beyond it are those of its last row.
    rows = jax.jit(look_up)(by_kernel["embed"], np.array([0, 7, 399, 500], np.int32))
    np.testing.assert_array_equal(rows, np.asarray(plain["embed"])[[0, 7, 399, 399]])
    # Tokens are rounded to eight bits.
    assert np.abs(ours - expected).max() < 0.02 * np.abs(expected).max()


def test_devices_share_blocks_out_and_stacks_are_decoded_where_layers_differ(q4_k_m: Path) -> None:
    params = load(q4_k_m, BY_TILE, size=2)
    assert isinstance(params["layers"][3]["qkv"].form, InParts)
    chex.assert_trees_all_equal(
        jax.tree.map(decoded, params, is_leaf=lambda node: isinstance(node, Matrix)),
        jax.tree.map(np.asarray, load(q4_k_m, Forms(), size=2)),
    )
    stacked = load(q4_k_m, BY_TILE, layout="stacked")["layers"]
    assert {name for name, node in stacked.items() if isinstance(node, Matrix)} == {"o", "gate_up"}


def test_loading_takes_the_stored_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_files, "_MOST", 1 << 13)
    monkeypatch.setattr(few_bits, "_MOST", 1 << 13)
    path = tmp_path / "model.gguf"
    write_q4_k_m(path, CONFIG | {"intermediate_size": 4096, "vocab_size": 300})
    load(path, BY_TILE)  # what is compiled and imported once
    tracemalloc.start()
    try:
        params = load(path, BY_TILE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(params["layers"][0]["down"], Matrix)
    assert peak < 1.1 * path.stat().st_size


@pytest.mark.parametrize(
    ("code", "has_mins", "most", "largest"),
    [(UINT6, False, 0.75, 0.3), (UINT4, True, 0.75, 0.3), (IQ4, False, 13, 0.4)],
)
def test_new_weights_are_rounded_to_the_nearest(code: Code, has_mins: bool, most: float, largest: float) -> None:
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 512)), jnp.float32).at[0, 3].set(0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = NestedGroups(code, 32, "int8", False, 1, 256, has_mins)
    decls = form.declare(ParamDecl(matrix.shape, (None, None, None), storage="matrix"))
    arrays = form.keep(matrix, dict.fromkeys(decls, place))
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: (decl.shape, decl.dtype_in("float32")) for name, decl in decls.items()
    }
    steps = np.repeat(np.asarray(arrays["scales"], np.float32), 32, -1) * np.repeat(
        np.asarray(arrays["factors"], np.float32), 256, -1
    )
    away = np.abs(decoded_arrays(form, arrays) - np.asarray(matrix))
    # Half a step, and what scales are rounded by. The widest step of a table is 24 of its units.
    assert (away[1] < most * steps[1]).all() and away.max() < largest
    assert not away[0, 3].any()
    damaged = form.keep(matrix.at[1, 2, 40].set(jnp.nan), dict.fromkeys(decls, place))
    assert np.isnan(decoded_arrays(form, damaged)[1, 2, 32:64]).all()
    # In panels, and in a part of a matrix, they are the same numbers.
    stored = StoredAs(form.code, 32, "int8", span=256, has_mins=has_mins)
    chip = host_chip()
    ours = InParts(1, ((4, form), (2, CpuGroups(stored, 32, chip)))).of_matrix(
        ParamDecl(matrix.shape, (None, None, None), storage="matrix")
    )
    names = ours.declare(ParamDecl(matrix.shape, (None, None, None), storage="matrix"))
    halves = ours.keep(matrix, dict.fromkeys(names, place))
    assert {name: array.shape for name, array in halves.items()} == {name: one.shape for name, one in names.items()}
    panels = ours.parts[1][1]
    assert isinstance(panels, CpuGroups)
    own = {name[2:]: array.reshape(-1, *array.shape[2:]) for name, array in halves.items() if name[0] == "1"}
    rows = decoded_rows(panels.panels(512), own, jnp.array([0, 1, chip.panel_columns, chip.panel_columns + 1]), 512)
    np.testing.assert_array_equal(rows, decoded_arrays(form, arrays)[:, 4:].reshape(4, 512))


@pytest.mark.parametrize("code", [IQ4, IQ3_XXS, IQ3_S, IQ2, IQ1], ids=lambda code: code.name)
def test_weights_get_the_nearest_numbers_of_a_table(code: Code) -> None:
    values = np.linspace(-code.largest, code.largest, 999, dtype=np.float32)
    found = code.table[np.asarray(code.nearest_codes(jnp.asarray(values)))]
    numbers = code.table[:16]
    np.testing.assert_array_equal(np.abs(found - values), np.abs(numbers - values[:, None]).min(1))
    # A table may have no 0, so that zeros have no scale.
    arrays = ScaledGroups(code, 32, "float16").rounded(jnp.zeros((1, 32)), 32)
    assert not decoded_matrix(code, arrays["codes"], arrays["scales"]).any()


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.IQ4_XS], ids=lambda kind: kind.name)
def test_a_stack_of_matrices_is_kept(kind: Kind) -> None:
    data = random_blocks(kind, 3 * 2 * 5, 512 // STORED_TYPES[kind].count)
    expected = gguf.quants.dequantize(data, kind).reshape(3, 2, 5, 512)
    part = STORED_TYPES[kind].part(data.reshape(3, 10, -1))
    box = Box((1, 3, 7), (2, 4, 300))
    np.testing.assert_array_equal(part(box), expected.reshape(3, 10, 512)[box.index((0, 0, 0))])
    # Gates and features of all experts are one tensor.
    stored = StoredCodes(((Source("x", (3, 10, 512), (0,) * 4, (3, 2, 5, 512)), part),))
    matrix = ParamDecl((3, 2, 5, 512), (None,) * 4, storage="experts")
    way = stored.stored_as(512)
    assert way is not None
    form = FewBitsForms(Backend("cpu", host_chip()), True).of(way, way.group)
    assert form is not None
    form = form.of_matrix(matrix)
    assert isinstance(form, CpuGroups)
    arrays = {name: np.asarray(array) for name, array in filled(form, matrix, stored).items()}
    np.testing.assert_array_equal(panels_matrix(form.panels(512), arrays, 5, 512), expected)
