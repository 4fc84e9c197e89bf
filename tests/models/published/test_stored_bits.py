"""What a checkpoint stores in few bits is kept: its arrays mean what the checkpoint means, and multiply accordingly."""

import logging
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix, few_bits, scaled_groups
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.cpu_decoded import CpuDecoded
from jaxvllm.models.forms.cpu_groups import CodeTable, CpuGroups
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.form import Experts
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.scaled_rows import ScaledRows
from jaxvllm.models.published import encoded_files, published_encoding, stored_codes
from jaxvllm.models.published.parts import ScaledCodes, by_group, integers, scaled, stored, unpacked
from jaxvllm.models.published.stored_codes import StoredCodes
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_forms import expected_forms
from jaxvllm.models.tiling import Fill
from jaxvllm.models.weight_names import Source
from jaxvllm.planner.share import Share
from pallas_kernels.backend import Backend
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4, INT8, UINT4, Code
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.models.published.test_mxfp4 import MXFP4_PACKED, MXFP8, gpt_oss, mxfp, random_experts
from tests.models.published.test_mxfp4 import SETTINGS as MXFP4
from tests.models.published.test_packed_integers import compressed, packed, random_codes
from tests.models.published.written import fp8_checkpoint, resized, write_model
from tests.pallas_kernels.code_panels import matrix, rounded

TILES = Forms(stored=FewBitsForms(by_tile=True))
ROWS = Forms(stored=FewBitsForms())
PANELS = Forms(stored=FewBitsForms(Backend("cpu", host_chip()), by_tile=True))


def load(directory: Path, forms: Forms = TILES, size: int = 1, **options: Any) -> Any:
    config = checkpoint.read_config(directory)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    if forms.stored is not None:
        forms = replace(forms, stored=replace(forms.stored, shards=size))
    usual = {"dtype": jnp.float32, "layout": "separate", "mesh": mesh, "forms": forms}
    return checkpoint.load(directory, model_spec(config), **(usual | options))


def values(node: Any) -> np.ndarray:
    """The matrix that a node stands for, by what its form says in words."""
    if not isinstance(node, Matrix):
        return np.asarray(node, np.float32)
    arrays = {name: np.asarray(array) for name, array in node.arrays.items()}
    form = node.form.groups if isinstance(node.form, CodeTable) else node.form
    if isinstance(form, ScaledRows):
        return arrays["values"].astype(np.float32) * arrays["scales"][..., None]
    if isinstance(form, CpuGroups):
        *others, blocks, _, depth = arrays["codes"].shape
        per_byte = 1 if form.stored.code.bits == 8 else 2
        panels = form.panels(inputs := blocks * depth * per_byte)  # which are whole blocks
        assert tuple(others[:-1]) == form.outs[:-1]
        return matrix(panels, arrays, form.outs[-1], inputs).astype(np.float32)
    assert isinstance(node.form, ScaledGroups)
    code, codes = node.form.code, arrays["codes"]
    if code.per_byte == 2:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    numbers = code.table[codes.view(np.uint8)]
    scales = arrays["scales"].view(jnp.dtype(node.form.scale_dtype)).astype(np.float32)
    group = numbers.shape[-1] // scales.shape[-1]
    zeros = arrays["zeros"].astype(np.float32) if "zeros" in arrays else np.full_like(scales, code.zero)
    return (numbers - np.repeat(zeros, group, -1)) * np.repeat(scales, group, -1)


def decoded(params: Any) -> Any:
    return jax.tree.map(values, params, is_leaf=lambda node: isinstance(node, Matrix))


def kept(params: Any) -> set[str]:
    layers = params["layers"] if isinstance(params["layers"], list) else [params["layers"]]
    return {name for layer in layers for name, node in layer.items() if isinstance(node, Matrix)}


def of_projections(
    directory: Path,
    fixture: Fixture,
    settings: Mapping[str, Any],
    parts: Any,
    ignored: tuple[str, ...] = (),
    others: Any = None,
) -> Path:
    """The model of a fixture whose projections are stored as `parts` says.

    Those with names that end as one of `ignored` does are stored as `others` says, or not quantized.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, weight in fixture.weights().items():
        make = others if ignored and name.endswith(ignored) else parts
        if weight.ndim == 2 and "_proj" in name and make is not None:
            base = name.removesuffix(".weight")
            tensors |= {f"{base}.{part}": array for part, array in make(weight.shape, len(name)).items()}
        else:
            tensors[name] = weight
    return write_model(directory, fixture.config | {"quantization_config": dict(settings)}, tensors)


def scales_of(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(shape[0]).uniform(1e-3, 9e-3, shape).astype(dtype)


def gptq(shape: tuple[int, int], seed: int, bits: int = 4) -> dict[str, np.ndarray]:
    (rows, columns), groups = shape, -(-shape[1] // 16)
    return {
        "qweight": packed(random_codes(shape, bits, seed), bits).T,
        "qzeros": packed(random_codes((groups, rows), bits, seed + 1), bits),
        "scales": scales_of((groups, rows), np.float16),
        "g_idx": np.arange(columns, dtype=np.int32) // 16,
    }


def awq(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    rows, groups = shape[0], -(-shape[1] // 16)
    return {
        "qweight": packed(random_codes(shape[::-1], 4, seed), 4),
        "qzeros": packed(random_codes((groups, rows), 4, seed + 1), 4),
        "scales": scales_of((groups, rows), np.float16),
    }


def packed_integers(bits: int) -> Any:
    def parts(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
        return {
            "weight_packed": packed(random_codes(shape, bits, seed), bits),
            "weight_scale": scales_of((shape[0], -(-shape[1] // 16)), ml_dtypes.bfloat16),
            "weight_shape": np.array(shape),
        }

    return parts


def int8_rows(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    codes = np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8)
    return {"weight": codes, "weight_scale": scales_of((shape[0], 1), ml_dtypes.bfloat16)}


def nvfp4(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    codes = random_codes(shape, 4, seed).astype(np.uint8)
    return {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scales_of((shape[0], shape[1] // 16), ml_dtypes.float8_e4m3fn),
        "weight_scale_2": np.full((), 0.5, np.float32),
    }


def qwen() -> Fixture:
    """A fixture whose matrices have sides that eight divides."""
    return resized(Fixture.load("qwen3"), {100: 96}, intermediate_size=96)


INT4 = compressed("pack-quantized", num_bits=4, type="int", group_size=16)
# Rows of int8 are made for rounded tokens, and groups of four bits beside them are not.
W8A8_AND_INT4 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
W8A8_AND_INT4["config_groups"]["group_0"]["input_activations"] = {
    "num_bits": 8, "type": "int", "dynamic": True, "strategy": "token",
}  # fmt: skip
W8A8_AND_INT4["config_groups"]["group_1"] = INT4["config_groups"]["group_0"]

CASES = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq, UINT4),
    "gptq8": ({"quant_method": "gptq", "bits": 8, "group_size": 16}, partial(gptq, bits=8), INT8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, awq, UINT4),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4, FLOAT4),
    "int4": (W8A8_AND_INT4, packed_integers(4), UINT4),
    "int8": (compressed("pack-quantized", num_bits=8, type="int", group_size=16), packed_integers(8), INT8),
}


@pytest.mark.parametrize("name", CASES)
def test_codes_are_kept_as_they_are_stored(name: str, tmp_path: Path) -> None:
    settings, parts, code = CASES[name]
    path = of_projections(tmp_path, qwen(), settings, parts)
    for size, layout in ((1, "separate"), (1, "stacked"), (4, "separate")):
        params = load(path, size=size, layout=layout)
        assert kept(params) == {"qkv", "o", "gate_up", "down"}
        nodes = jax.tree.leaves(params["layers"], is_leaf=lambda node: isinstance(node, Matrix))
        assert {node.form.code for node in nodes if isinstance(node, Matrix)} == {code}
        chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms(), size, layout=layout)))
    check_panels(path)


def check_panels(path: Path, form: type[CpuGroups] = CpuGroups) -> None:
    """The kernel for CPUs gets the same numbers, and multiplies tokens by them, which it rounds for integers."""
    params, plain = load(path, PANELS), load(path, Forms())
    nodes = jax.tree.leaves(params["layers"], is_leaf=lambda node: isinstance(node, Matrix))
    assert {type(node.form) for node in nodes if isinstance(node, Matrix)} == {form}
    chex.assert_trees_all_equal(decoded(params), decoded(plain))
    for name in kept(params) & params["layers"][0].keys():
        node, exact = params["layers"][0][name], np.asarray(plain["layers"][0][name], np.float64)
        x = np.random.default_rng(0).standard_normal((3, exact.shape[-1]), np.float32)
        tokens = x if form == CpuDecoded else rounded(x, node.form.panels(x.shape[1]).together)
        expected = np.einsum("ti,...i->t...", tokens, exact)
        y = jax.jit(partial(node.form.product, dtype=None))(jnp.asarray(x), node.arrays)
        # Rows of FP8 that have a code without a number are NaN in both.
        np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.nanmax(np.abs(expected)))


@pytest.mark.parametrize(("settings", "code"), [(MXFP4_PACKED, FLOAT4), (MXFP8, E4M3)])
def test_numbers_with_exponents_are_kept(settings: dict[str, Any], code: Code, tmp_path: Path) -> None:
    def parts(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
        return {name.removeprefix("x_proj."): array for name, array in mxfp(settings, *shape)[0].items()}

    fixture = resized(Fixture.load("qwen3"), {100: 96, 48: 64}, hidden_size=64, intermediate_size=96)
    path = of_projections(tmp_path, fixture, settings, parts)
    params = load(path)
    assert kept(params) == {"qkv", "o", "gate_up", "down"}
    assert {params["layers"][0][name].form.code for name in kept(params)} == {code}
    chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms())))
    if code == FLOAT4:
        check_panels(path)


# Latent attention, and experts; on so many devices that they have parts of blocks, and copies of heads. Six heads on
# four devices are filled up to eight, and those of the third one begin within a block.
@pytest.mark.parametrize(
    ("name", "block", "size", "num_heads"),
    [("deepseek_v3", (32, 16), 2, None), ("qwen3", (48, 32), 8, 4), ("qwen3", (48, 32), 4, 6)],
)
def test_blocks_of_fp8_are_kept_on_any_mesh(
    name: str, block: tuple[int, int], size: int, num_heads: int | None, tmp_path: Path
) -> None:
    fixture = resized(Fixture.load(name), {100: 96}, intermediate_size=96)
    if num_heads is not None:
        fixture = resized(fixture, {64: 16 * num_heads}, ".self_attn.", num_attention_heads=num_heads)
    path, _ = fp8_checkpoint(tmp_path, fixture, block)
    for devices, layout in ((1, "separate"), (size, "separate"), (size, "stacked")):
        params = load(path, size=devices, layout=layout)
        assert {"o", "gate_up", "down"} <= kept(params)
        chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms(), devices, layout=layout)))
    # Without a kernel for groups, what would be written in 16 bits by each step is decoded once.
    assert not kept(load(path, ROWS))
    check_panels(path, CpuDecoded)


def experts_in_mxfp4(directory: Path) -> Path:
    """A gpt-oss whose experts are stored as it is published."""
    fixture, tensors = gpt_oss(), {}
    for name, weight in fixture.weights().items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            X, columns, rows = weight.shape
            tensors |= random_experts(name, X, rows, columns)[0]
        else:
            tensors[name] = weight
    return write_model(directory, fixture.config | {"quantization_config": MXFP4}, tensors)


def test_experts_in_mxfp4_are_kept(tmp_path: Path) -> None:
    path = experts_in_mxfp4(tmp_path)
    for size in (1, 2):
        params = load(path, size=size)
        assert kept(params) == {"experts_gate_up", "experts_down"}
        chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms(), size)))
    spec = model_spec(checkpoint.read_config(path))
    logits, expected = (
        jax.jit(lambda params: dense_logits(params, spec, [5, 6, 7]))(load(path, forms)) for forms in (TILES, Forms())
    )
    chex.assert_trees_all_close(logits, expected, atol=2e-5, rtol=0)
    check_panels(path)


def test_rows_of_int8_are_multiplied_by_our_kernel_and_rows_of_fp8_by_xla(tmp_path: Path) -> None:
    settings = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    path = of_projections(tmp_path, qwen(), settings, int8_rows)
    plain = decoded(load(path, Forms()))
    for forms in (TILES, ROWS, PANELS):
        params = load(path, forms)
        assert kept(params) == {"qkv", "o", "gate_up", "down"}
        chex.assert_trees_all_equal(decoded(params), plain)


def test_layers_that_are_stored_in_several_ways_are_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, parts, _ = CASES["int4"]
    path = of_projections(tmp_path, qwen(), settings, parts, ignored=("1.mlp.down_proj.weight", "q_proj.weight"))
    with caplog.at_level(logging.INFO):
        params = load(path, layout="stacked")
    assert kept(params) == {"o", "gate_up"}  # a part of qkv is stored otherwise, and down in one layer
    assert "down is stored in several ways, so it is decoded in all" in caplog.text
    chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms(), layout="stacked")))
    # Where layers have arrays of their own, only that layer's is decoded.
    params = load(path)
    assert [isinstance(layer["down"], Matrix) for layer in params["layers"][:2]] == [True, False]
    chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms())))
    spec = model_spec(checkpoint.read_config(path))
    logits, expected = (
        jax.jit(lambda params: dense_logits(params, spec, [5, 6, 7]))(one) for one in (params, load(path, Forms()))
    )
    chex.assert_trees_all_close(logits, expected, atol=2e-5, rtol=0)


def test_experts_that_are_stored_in_several_ways_are_decoded(tmp_path: Path) -> None:
    first = ("experts.0.down_proj.weight",)
    fixture = Fixture.load("qwen3_moe")
    path = of_projections(tmp_path, fixture, W8A8_AND_INT4, packed_integers(4), first, int8_rows)
    params = load(path)
    assert "experts_down" not in (names := kept(params)) and "experts_gate_up" in names
    chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms())))


def test_the_tiles_of_a_matrix_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = packed(random_codes((6, 32), 4), 4)
    part = scaled(unpacked(codes, integers(4)), by_group(stored(scales_of((6, 2))), (1, 16)))
    assert isinstance(part, ScaledCodes)
    sources = [Source("x", (6, 32), (number, 0, 0), (1, 6, 32)) for number in range(3)]
    elements = StoredCodes(tuple((source, part) for source in sources)).elements
    made: list[Source] = []

    def counted(part: Any, source: Source) -> Fill:
        made.append(source)
        return encoded_files.decoded(part, source)

    monkeypatch.setattr(stored_codes, "decoded", counted)
    scales = np.zeros((3, 6, 32), np.float32)
    for row in range(6):
        elements.scales(scales[:, row : row + 1], (0, row, 0))
    assert made == sources
    np.testing.assert_array_equal(scales, np.broadcast_to(np.repeat(scales_of((6, 2)), 16, -1), scales.shape))
    # Zeros are found by group, too, and so without tiles of elements.
    zeros = np.ones((3, 6, 2), np.float32)
    few_bits.of_groups(elements.zeros, 16)(zeros, (0, 0, 0))
    assert not zeros.any() and made == sources + [replace(one, shape=(6, 2), view=(1, 6, 2)) for one in sources]


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    settings, parts, _ = CASES["gptq"]

    def with_bias(shape: tuple[int, int], seed: int, value: float) -> dict[str, np.ndarray]:
        return parts(shape, seed) | {"bias": np.full(shape[0], value, np.float16)}

    biased = of_projections(tmp_path / "biased", qwen(), settings, partial(with_bias, value=0))
    plain = of_projections(tmp_path / "plain", qwen(), settings, parts)
    chex.assert_trees_all_equal(load(biased), load(plain))
    of_projections(tmp_path / "biased", qwen(), settings, partial(with_bias, value=0.5))
    with pytest.raises(ValueError, match="unexpected tensor model.layers.0.mlp.down_proj.bias and 27 more"):
        load(biased)


def test_groups_that_are_not_there_are_told(tmp_path: Path) -> None:
    settings, parts, _ = CASES["gptq"]
    path = of_projections(tmp_path, qwen(), settings | {"group_size": 32}, parts)
    with pytest.raises(ValueError, match=r"_proj.g_idx has groups 0 to \d: \d+ inputs in groups of 32 have the groups"):
        load(path)


def test_rows_of_odd_length_are_decoded(tmp_path: Path) -> None:
    settings, parts, _ = CASES["int4"]
    path = of_projections(tmp_path, resized(qwen(), {96: 97}, intermediate_size=97), settings, parts)
    params = load(path)
    assert kept(params) == {"qkv", "o", "gate_up"}  # down has 97 inputs
    chex.assert_trees_all_equal(decoded(params), decoded(load(path, Forms())))


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    settings, whole, _ = CASES["int4"]

    def parts(shape: tuple[int, int], seed: int, changes: Any) -> dict[str, np.ndarray]:
        found = whole(shape, seed) | changes
        return {name: array for name, array in found.items() if array is not None}

    for changes, message in (
        ({"weight_scale": None}, r"lacks the tensor model.layers.0.*_proj.weight_scale"),
        ({"weight_scale": np.ones((3, 5), np.float32)}, r"model.safetensors: tensor .*weight_scale has shape \(3, 5\)"),
        ({"weight_packed": np.ones((3, 5), np.int32)}, r"model.safetensors: tensor .*weight_packed has shape \(3, 5\)"),
        ({"weight_scale": np.ones((3, 5), np.int32)}, r"weight_scale has shape \(3, 5\)"),
    ):
        path = of_projections(tmp_path, qwen(), settings, partial(parts, changes=changes))
        with pytest.raises(ValueError, match=message):
            load(path)


def matrix_of(code: Code, rows: int, columns: int, group: int, has_zeros: bool = False) -> tuple[ScaledGroups, Any]:
    """A form, and arrays that keep a random matrix in it."""
    stream = np.random.default_rng(rows)
    form = ScaledGroups(code, group, "float8_e8m0fnu" if code == FLOAT4 else "float32", has_zeros)
    codes = stream.integers(0, 256, (rows, columns // code.per_byte)).astype(np.uint8)
    if code == E4M3:
        codes = np.where(codes & 127 == 127, 0, codes).astype(np.uint8)  # these are no numbers
    scales = stream.integers(120, 128, (rows, columns // group)).astype(np.uint8)
    if code != FLOAT4:
        scales = stream.uniform(1e-3, 9e-3, scales.shape).astype(np.float32)
    arrays = {"codes": codes.view(np.int8) if code == INT8 else codes, "scales": scales}
    if has_zeros:
        arrays["zeros"] = stream.integers(0, 16, scales.shape).astype(code.dtype)
    return form, arrays


@pytest.mark.parametrize(
    ("code", "has_zeros"), [(UINT4, False), (UINT4, True), (INT8, True), (E4M3, False), (FLOAT4, False)], ids=str
)
def test_a_product_is_that_of_the_decoded_matrix(code: Code, has_zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_groups, "_TILE", 64 * 4)  # four rows at a time, of which some are computed twice
    form, arrays = matrix_of(code, 30, 64, 16, has_zeros)
    matrix = values(Matrix(form, arrays))
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    y = jax.jit(lambda x, arrays: form.product(x, arrays, None))(x, arrays)
    np.testing.assert_allclose(y, x @ matrix.T, rtol=2e-5, atol=2e-5)
    # The same rows as five experts of six rows, of which the second has no tokens.
    stack = {name: array.reshape(5, 2, 3, -1) for name, array in arrays.items()}
    starts = np.array([0, 1, 1, 3, 4, 5], np.int32)
    multiply = jax.jit(lambda x, stack, starts: form.grouped_product(x, Experts([stack]), starts))
    expected = [matrix.reshape(5, 2, 3, 64)[expert] @ row for expert, row in zip([0, 2, 2, 3, 4], x, strict=True)]
    np.testing.assert_allclose(multiply(x, stack, starts), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "is_of_experts"),
    [
        (ScaledGroups(UINT4, 32, "bfloat16"), False),
        (ScaledGroups(E4M3, 128, "float32"), False),
        (ScaledGroups(FLOAT4, 32, "float8_e8m0fnu"), True),
    ],
)
def test_no_decoded_copy_of_a_matrix(form: ScaledGroups, is_of_experts: bool) -> None:
    shape = (4, 2048, 2048) if is_of_experts else (4096, 2048)
    decls = form.declare(ParamDecl(shape, (None,) * len(shape), storage="matrix"))
    arrays = {name: jax.ShapeDtypeStruct(decl.shape, decl.dtype_in("float32")) for name, decl in decls.items()}
    x, starts = jax.ShapeDtypeStruct((8, 2048), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    if is_of_experts:
        lowered = jax.jit(lambda x, a, starts: form.grouped_product(x, Experts([a]), starts)).lower(x, arrays, starts)
    else:
        lowered = jax.jit(lambda x, a: form.product(x, a, None)).lower(x, arrays)
    memory = lowered.compile().memory_analysis()
    # A matrix is at most 8 MiB stored, and decoded 32. A tile is 1 MiB, and so would be scales of the first as float32.
    assert memory is not None and memory.temp_size_in_bytes < 1.7 * 2**20


def test_matrices_are_rounded_by_group() -> None:
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 96)), jnp.float32).at[0, 3].set(0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for form, step in ((ScaledGroups(UINT4, 32, "bfloat16"), 0.5), (ScaledGroups(E4M3, None, "float32"), 16)):
        arrays = form.keep(matrix, {"codes": place, "scales": place})
        scales = np.asarray(arrays["scales"], np.float32)
        assert scales.shape[-1] == (3 if form.group else 1)
        # An integer is at most half a step away, and an FP8 number half of the largest distance of two.
        away = np.abs(values(Matrix(form, arrays)) - np.asarray(matrix))
        assert (away <= np.repeat(scales, 96 // scales.shape[-1], -1) * step * 1.001).all()
        largest = np.abs(np.asarray(matrix)).reshape(*scales.shape, -1).max(-1)
        np.testing.assert_allclose(scales, np.where(largest > 0, largest / form.code.largest, 1), rtol=2**-8)
    # Of numbers e2m1 the largest two are 2 apart, and the scale is a power of two.
    form = ScaledGroups(FLOAT4, 32, "float8_e8m0fnu")
    arrays = form.keep(matrix, {"codes": place, "scales": place})
    scales = 2.0 ** (np.asarray(arrays["scales"], np.float32) - 127)
    largest = np.abs(np.asarray(matrix)).reshape(*scales.shape, -1).max(-1)
    assert ((largest <= 6 * scales) & ((largest > 3 * scales) | (largest == 0))).all()
    numbers = values(Matrix(form, arrays)) / np.repeat(scales, 32, -1)
    exact = np.asarray(matrix) / np.repeat(scales, 32, -1)
    nearest = FLOAT4.table[:16][np.abs(exact[..., None] - FLOAT4.table[:16]).argmin(-1)]
    np.testing.assert_array_equal(numbers, nearest)
    with pytest.raises(ValueError, match="an even number of the inputs of a matrix, not [0-9]*[13579]: use int8"):
        ScaledGroups(UINT4, 32, "bfloat16", shards=2).declare(ParamDecl((4, 6), (None, "ffn"), storage="matrix"))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16", "float8_e8m0fnu"])
@pytest.mark.parametrize("group", [None, 32])
def test_new_weights_have_the_dtypes_of_those_they_replace(scale_dtype: str, group: int | None) -> None:
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(12, 96)), jnp.float32).at[3].set(0)
    decl = ParamDecl(weights.shape, (None, None), storage="matrix")
    for code, has_zeros in ((INT8, False), (INT8, True), (UINT4, True), (FLOAT4, False)):
        stored_as = StoredAs(code, group, scale_dtype, has_zeros)
        assert CpuGroups.takes_stored(stored_as, group)
        form = CpuGroups(stored_as, group, host_chip()).of_matrix(decl)
        decls = form.declare(decl)
        arrays = form.keep(weights, dict.fromkeys(decls, jax.sharding.SingleDeviceSharding(jax.devices()[0])))
        assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
            name: (one.shape, one.dtype_in("float32")) for name, one in decls.items()
        }
        # No element is further away than half of the largest step, by the scales as they are kept.
        groups = np.abs(np.asarray(weights)).reshape(12, -1, group or 96).max(-1)
        step = {INT8: 0.5 / 127, UINT4: 0.5 / 7, FLOAT4: 1 / 6}[code] * (2 if scale_dtype == "float8_e8m0fnu" else 1)
        away = np.abs(values(Matrix(form, arrays)) - np.asarray(weights))
        assert (away <= np.repeat(groups, group or 96, -1) * step * 1.01).all()


def test_loading_takes_the_stored_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_files, "_MOST", 1 << 13)
    monkeypatch.setattr(few_bits, "_MOST", 1 << 13)
    settings, parts, _ = CASES["int4"]
    fixture = resized(qwen(), {96: 16384}, intermediate_size=16384)
    path = of_projections(tmp_path, fixture, settings, parts)
    load(path)  # what is compiled and imported once
    tracemalloc.start()
    try:
        params = load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stored = (path / "model.safetensors").stat().st_size
    assert kept(params) == {"qkv", "o", "gate_up", "down"}
    assert peak < 1.1 * stored


def test_scales_of_padding_are_finite():
    def nothing(out: np.ndarray, start: tuple[int, ...]) -> None:
        pass

    form, matrix = ScaledGroups(E4M3, 16, "float8_e8m0fnu"), ParamDecl((8, 32), ("heads", "embed"))
    scales = np.full((8, 2), 255, np.uint8)
    form.fills(matrix, few_bits.Elements(nothing, nothing, nothing, nothing))["scales"](scales, (0, 0))
    assert np.isfinite(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)).all()


def test_a_plan_counts_what_is_kept(tmp_path: Path) -> None:
    path, _ = fp8_checkpoint(tmp_path, qwen(), (16, 16))
    config = checkpoint.read_config(path)
    spec, encoding = model_spec(config), published_encoding(config)
    assert encoding is not None
    params = load(path)
    forms = replace(TILES, own=expected_forms(encoding, Spread(spec), jnp.float32, TILES))
    dummy = load(path, load_format="dummy")
    chex.assert_trees_all_equal_shapes_and_dtypes(dummy, params)
    share = Share(Spread(spec), jnp.dtype("float32"), forms)
    assert share.weight_bytes == sum(array.nbytes for array in jax.tree.leaves(params))
    assert share.flops(7, 3) == Share(Spread(spec), jnp.dtype("float32")).flops(7, 3)
    int4 = FewBitsForms(by_tile=True).named("int4_g32")
    assert Share(Spread(spec), jnp.dtype("float32"), Forms(layers=int4)).flops(7, 3) == share.flops(7, 3)
