"""The form of matrices in few bits on GPUs: what it computes, interpreted, is what XLA computes of the same arrays."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import Form, Forms
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.filled_up import with_zeros
from jaxvllm.models.forms.gpu_groups import GpuGroups
from jaxvllm.models.forms.rounded_tokens import RoundedTokens
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.scaled_rows import ScaledRows, rounded_by_row
from jaxvllm.models.ops import InStack, project, project_grouped, project_grouped_gated
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.quantized_matmul import gpu, gpu_tiles
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4, INT8, UINT4, Code
from tests.models.published.test_stored_bits import CASES, kept, load, of_projections, qwen, resized

pytestmark = pytest.mark.usefixtures("quick_fusions", "interpreted_kernels")

CHIP = chip_named("h200")
assert isinstance(CHIP, GpuChip)
FORM = GpuGroups(UINT4, 32, "bfloat16", has_zeros=True, chip=replace(CHIP, num_sms=2), interpret=True)
SAME_BY_XLA = ScaledGroups(UINT4, 32, "bfloat16", has_zeros=True)
STARTS = jnp.array([0, 4, 4, 10], jnp.int32)


def layer(form: Form) -> np.ndarray:
    """Rows through the second of two layers, which has a matrix and then three experts."""
    rng = np.random.default_rng(0)
    device = SingleDeviceSharding(jax.devices()[0])
    # Halves of heads and of gates, which are dimensions of their own.
    shapes = {"matrix": (2, 2, 64, 128), "gate_up": (2, 3, 2, 64, 128), "down": (2, 3, 64, 128)}
    matrices = {}
    for name, shape in shapes.items():
        array = jnp.asarray(rng.standard_normal(shape, np.float32) / 8, jnp.bfloat16)
        decl = ParamDecl(shape, (None,) * len(shape), "ones")
        matrices[name] = form.wrapped(form.keep(array, dict.fromkeys(form.declare(decl), device)))
    x = jnp.asarray(rng.standard_normal((12, 128), np.float32), jnp.bfloat16)

    @jax.jit
    def run(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        in_stack = {name: InStack(matrix, number) for name, matrix in matrices.items()}
        x = project(x, in_stack["matrix"]).reshape(12, 128)
        h = project_grouped_gated(x, in_stack["gate_up"], STARTS, "silu")
        h = jnp.concatenate([h, h], 1)
        return project(h, in_stack["matrix"], dtype=jnp.float32), project_grouped(h, in_stack["down"], STARTS)

    y, of_experts = run(x, jnp.int32(1))
    assert (y.shape, y.dtype, of_experts.shape, of_experts.dtype) == ((12, 2, 64), jnp.float32, (12, 64), jnp.bfloat16)
    return np.concatenate([np.asarray(y)[:10].reshape(10, -1), np.asarray(of_experts, np.float32)[:10]], 1)


def test_computes_what_xla_computes() -> None:
    expected = layer(SAME_BY_XLA)
    np.testing.assert_allclose(layer(FORM), expected, rtol=0, atol=0.01 * np.abs(expected).max())


def test_what_the_kernel_does_not_take_xla_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tiles, "choose_tiles", lambda *_: None)
    monkeypatch.setattr(gpu, "quantized_matmul", None)
    np.testing.assert_array_equal(layer(FORM), layer(SAME_BY_XLA))


def test_is_chosen_for_gpus_alone() -> None:
    on_gpu = FewBitsForms(Backend("gpu", CHIP), shards=2)
    # One scale a row, groups, blocks; with zeros, and with scales that are powers of two.
    for code, group, scale_dtype, has_zeros in (
        (INT8, None, "float32", False),
        (UINT4, 128, "bfloat16", True),
        (E4M3, 128, "float32", False),
        (FLOAT4, 32, "float8_e8m0fnu", False),
        (FLOAT4, 16, "float8_e4m3fn", False),  # NVFP4
    ):
        form = on_gpu.of(StoredAs(code, group, scale_dtype, has_zeros), group)
        assert form == GpuGroups(code, group, scale_dtype, has_zeros, 2, chip=CHIP)
    assert on_gpu.of(StoredAs(FLOAT4, 16, "float32"), 16) is None  # of rows whose parts have scales of their own
    assert isinstance(FewBitsForms().of(StoredAs(INT8, None, "float32"), None), ScaledRows)
    forms = Forms.chosen("int4", Backend("gpu", CHIP), may_turn=False)
    assert forms.layers == forms.experts == GpuGroups(UINT4, 128, "bfloat16", chip=CHIP)


@pytest.mark.parametrize(
    ("code", "group", "scale_dtype", "shape", "shards", "expected"),
    [
        # The second matrix of gpt-oss on two GPUs, whose rows of 720 bytes no swizzle divides.
        (FLOAT4, 32, "float8_e8m0fnu", (2880, 2880), 2, {"codes": (2880, 1472), "scales": (2880, 92)}),
        # Four heads of Kimi Linear; and blocks of which the last one has four inputs.
        (UINT4, 128, "bfloat16", (4, 385, 2304), 1, {"codes": (4, 392, 1152), "scales": (4, 385, 18)}),
        (E4M3, 128, "float32", (1540, 1540), 1, {"codes": (1544, 1664), "scales": (1540, 13)}),
        (INT8, None, "float32", (30, 100), 1, {"codes": (64, 128), "scales": (30, 1)}),
        (FLOAT4, 16, "float8_e4m3fn", (72, 96), 1, {"codes": (72, 64), "scales": (72, 8), "row_scales": (72, 1)}),
    ],
)
def test_zeros_fill_rows_and_inputs_up(
    code: Code,
    group: int | None,
    scale_dtype: str,
    shape: tuple[int, ...],
    shards: int,
    expected: dict[str, tuple[int, ...]],
) -> None:
    form = GpuGroups(code, group, scale_dtype, shards=shards, chip=CHIP)
    decl = ParamDecl(shape, (*(None,) * (len(shape) - 1), "ffn"), storage="matrix")
    assert form.takes(decl)
    assert {name: part.shape for name, part in form.declare(decl).items()} == expected


@pytest.mark.parametrize(
    ("code", "group", "scale_dtype", "shape"),
    [(FLOAT4, 16, "float8_e4m3fn", (3, 28, 100)), (INT8, None, "float32", (70, 90))],
)
def test_a_product_of_any_size(code: Code, group: int | None, scale_dtype: str, shape: tuple[int, ...]) -> None:
    """By the kernel, in bfloat16, what XLA computes in float32 of the same numbers; and they are near the matrix."""
    form = GpuGroups(code, group, scale_dtype, chip=FORM.chip, interpret=True)
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal(shape).astype(np.float32)
    decls = form.declare(ParamDecl(shape, (None,) * len(shape), storage="matrix"))
    arrays = form.keep(jnp.asarray(matrix), dict.fromkeys(decls, SingleDeviceSharding(jax.devices()[0])))
    assert {name: array.shape for name, array in arrays.items()} == {name: part.shape for name, part in decls.items()}
    x = jnp.asarray(rng.standard_normal((3, shape[-1])), jnp.bfloat16)
    multiply = jax.jit(lambda x: form.product(x, arrays, jnp.float32))
    y, exact = np.asarray(multiply(x)), np.asarray(multiply(x.astype(jnp.float32)))
    assert y.shape == (3, *shape[:-1])
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)
    decoded = np.asarray(jax.jit(lambda x: form.product(x, arrays, None))(jnp.eye(shape[-1])))
    away = np.abs(np.moveaxis(decoded, 0, -1) - matrix)
    assert away.max() <= {INT8: 0.02, FLOAT4: 0.6}[code] and 0 < away.mean() < 0.12


def test_tokens_in_fp8_are_multiplied_as_they_are() -> None:
    on_gpu = FewBitsForms(Backend("gpu", FORM.chip, interpret=True))
    form, rows = on_gpu.named("fp8_w8a8"), RoundedTokens(code=E4M3)
    assert form == GpuGroups(E4M3, None, "float32", rounds_tokens=True, chip=FORM.chip, interpret=True)
    assert on_gpu.named("fp8_w8a8", of_experts=True) == replace(form, rounds_tokens=False)
    assert on_gpu.named("int8_w8a8") == RoundedTokens(code=INT8)  # XLA multiplies without a copy
    rng, device = np.random.default_rng(2), SingleDeviceSharding(jax.devices()[0])
    matrix = jnp.asarray(rng.standard_normal((2, 40, 150)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((11, 150)), jnp.bfloat16)
    products = []
    for kind in (form, rows):
        decls = kind.declare(ParamDecl(matrix.shape, (None,) * 3, storage="matrix"))
        arrays = kind.keep(matrix, dict.fromkeys(decls, device))
        multiply = jax.jit(lambda x, arrays, kind=kind: kind.product(x, arrays, jnp.float32))
        products.append(np.asarray(multiply(x, arrays)))
    codes, sizes = (np.asarray(array, np.float64) for array in rounded_by_row(x, E4M3))
    weights, scales = (np.asarray(arrays[name], np.float64) for name in ("values", "scales"))
    exact = np.einsum("ti,hoi,t,ho->tho", codes, weights, sizes, scales)
    for product in products:
        np.testing.assert_allclose(product, exact, rtol=0, atol=2e-6 * np.abs(exact).max() * 8)


def fixed_scales(shape: tuple[int, ...], _: int) -> dict[str, np.ndarray]:
    """A matrix in FP8 with one scale, and the scale of its tokens, which differs between tensors of different sizes."""
    values = np.random.default_rng(shape[0]).normal(0, 50, shape).astype(ml_dtypes.float8_e4m3fn)
    return {
        "weight": values,
        "weight_scale": np.full((), 1e-3, np.float32),
        "input_scale": np.full((), shape[0] / 20000, np.float32),
    }


def block_scales(shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    grid = tuple(-(-size // 128) for size in shape)
    scales = np.random.default_rng(seed).uniform(1e-3, 2e-3, grid).astype(np.float32)
    return {"weight": fixed_scales(shape, seed)["weight"], "weight_scale_inv": scales}


@pytest.mark.parametrize("kind", ["blocks", "fixed"])
def test_tokens_are_rounded_as_a_checkpoint_says(kind: str, tmp_path: Path) -> None:
    """In groups of 128 inputs, of which `down` has two, or with a scale that a file has: the largest of q, k and v."""
    fixture = resized(qwen(), {96: 160}, intermediate_size=160)
    if kind == "blocks":
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        path = of_projections(tmp_path, fixture, settings, block_scales)
    else:
        path = of_projections(tmp_path, fixture, {"quant_method": "modelopt", "quant_algo": "FP8"}, fixed_scales)
    forms = Forms(stored=FewBitsForms(Backend("gpu", FORM.chip, interpret=True)))
    params, plain = load(path, forms), load(path, Forms())
    for name in ("qkv", "down"):
        node, exact = params["layers"][0][name], np.asarray(plain["layers"][0][name], np.float64)
        assert (node.form.rounds_tokens, node.form.has_input_scale) == (kind == "blocks", kind == "fixed")
        # Some numbers are larger than the largest code times the scale of a file.
        x = jnp.asarray(np.random.default_rng(3).standard_normal((3, exact.shape[-1])), jnp.bfloat16)
        tokens = np.asarray(x, np.float32)
        if kind == "blocks":
            groups = [tokens[:, start : start + 128] for start in range(0, tokens.shape[1], 128)]
            scales = [np.abs(group).max(1, keepdims=True) * np.float32(1 / 448) for group in groups]
            scale = np.concatenate([np.broadcast_to(s, g.shape) for s, g in zip(scales, groups, strict=True)], 1)
        else:
            scale = np.float32((48 if name == "down" else 64) / 20000)
            assert (np.abs(tokens) > 448 * scale).any()
        tokens = np.clip(tokens / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        y = jax.jit(lambda x, node=node: node.form.product(x, node.arrays, jnp.float32))(x)
        expected = np.einsum("ti,...i->t...", tokens, exact)
        np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "inputs", "size"), [("nvfp4", 96, 1), ("nvfp4", 96, 2), ("int8", 97, 1)])
def test_what_a_checkpoint_stores_is_kept(name: str, inputs: int, size: int, tmp_path: Path) -> None:
    """Groups have 16 inputs, of which the last one has a single one where there are 97."""
    settings, parts, _ = CASES[name]
    path = of_projections(tmp_path, resized(qwen(), {96: inputs}, intermediate_size=inputs), settings, parts)
    forms = Forms(stored=FewBitsForms(Backend("gpu", FORM.chip, interpret=True)))
    params, plain = load(path, forms, size), load(path, Forms(), size)
    assert kept(params) == {"qkv", "o", "gate_up", "down"}
    for matrix_name in kept(params):
        node, exact = params["layers"][0][matrix_name], plain["layers"][0][matrix_name]
        # Each device has 64 bytes of codes of a row at least.
        least = 64 * node.form.code.per_byte
        devices = size if node.arrays["codes"].shape[-1] == 64 * size > 64 else 1
        x = with_zeros(jnp.eye(exact.shape[-1]), -1, devices, max(least, exact.shape[-1]))
        decoded = jax.jit(lambda x, node=node: node.form.product(x, node.arrays, None))(x)
        np.testing.assert_array_equal(np.moveaxis(np.asarray(decoded), 0, -1), exact)
