"""The form of groups on TPUs: its words mean what checkpoints store, and rows are multiplied accordingly."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.form import Experts
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.tpu_groups import TpuGroups
from jaxvllm.models.ops import InStack, project
from pallas_kernels.backend import Backend
from pallas_kernels.chips import TpuChip, chip_named
from pallas_kernels.quantized_matmul.code import FLOAT4, INT8, UINT4, Code
from tests.models.fixture import Fixture
from tests.models.published.test_packed_integers import compressed
from tests.models.published.test_stored_bits import CASES, experts_in_mxfp4, kept, load, of_projections
from tests.models.published.written import fp8_checkpoint, resized

pytestmark = pytest.mark.usefixtures("quick_fusions", "interpreted_kernels")

CHIP = chip_named("v6e")
assert isinstance(CHIP, TpuChip)
BACKEND = Backend("tpu", CHIP, interpret=True)


def on_tpu(size: int) -> Forms:
    return Forms(stored=FewBitsForms(BACKEND, shards=size))


def values(node: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The matrix [.., out, in] that a node stands for, by what its form says in words."""
    if not isinstance(node, Matrix):
        return np.asarray(node, np.float32)
    assert isinstance(node.form, TpuGroups)
    groups, arrays = node.form.groups, {name: np.asarray(array) for name, array in node.arrays.items()}
    code, words, scales = groups.code, arrays["codes"].view(np.uint32).swapaxes(-1, -2), arrays["scales"]
    # Of the bytes of eight words, the lower codes are 32 inputs, and the upper ones the next: [.., place, word, byte].
    of_bytes = np.ascontiguousarray(words)[..., None].view(np.uint8).reshape(*words.shape[:-1], -1, 1, 8, 4)
    places = [of_bytes] if code.per_byte == 1 else [of_bytes & 15, of_bytes >> 4]
    if code == FLOAT4:  # The bits of a byte are the first sign, three of the second size and of the first, a sign.
        places = [of_bytes >> 4 & 8 | of_bytes >> 1 & 7, (of_bytes & 1) << 3 | of_bytes >> 4 & 7]
    numbers = code.table[np.concatenate(places, -3).reshape(*words.shape[:-1], -1)]
    scales = np.exp2(scales.astype(np.float32) - 127) if scales.dtype == np.uint8 else scales.astype(np.float32)
    minus = arrays["zeros"].astype(np.float32) if "zeros" in arrays else np.full_like(scales, code.zero)
    *_, out, size = shape
    kept_codes = node.arrays["codes"]
    of_device = kept_codes.sharding.shard_shape(kept_codes.shape)
    parts_in, parts_out = (kept_codes.shape[i] // of_device[i] for i in (-2, -1))
    numbers = numbers.reshape(*numbers.shape[:-2], parts_out, -1, numbers.shape[-1])[..., : out // parts_out, :]
    numbers = numbers.reshape(*numbers.shape[:-3], out, -1)
    group = math.gcd(128, groups.group or 128, 128 if groups.group is None else size // parts_in)
    count = numbers.shape[-1] // parts_in // group

    def of_inputs(array: np.ndarray) -> np.ndarray:
        of_parts = array.reshape(*array.shape[:-2], parts_in, -1, out)[..., :count, :]
        return np.repeat(of_parts.reshape(*array.shape[:-2], -1, out).swapaxes(-1, -2), group, -1)

    scales, minus = of_inputs(scales), of_inputs(minus)
    wide = ((numbers - minus) * scales).reshape(*numbers.shape[:-1], parts_in, -1)
    return wide[..., : size // parts_in].reshape(*numbers.shape[:-1], size)


def assert_kept(params: Any, plain: Any) -> None:
    """Checks that a tree means another one, in which nothing is in few bits."""
    held = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Matrix))
    for node, expected in zip(held, jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(values(node, expected.shape), np.asarray(expected, np.float32))


@pytest.mark.parametrize("name", ["int4", "awq", "gptq8", "nvfp4"])
def test_codes_are_kept_as_they_are_stored(name: str, tmp_path: Path) -> None:
    settings, parts, _ = CASES[name]
    fixture = resized(Fixture.load("qwen3"), {100: 512}, intermediate_size=512)
    path = of_projections(tmp_path, fixture, settings, parts)
    for size, layout in ((1, "stacked"), (2, "separate")):
        params = load(path, on_tpu(size), size, layout=layout)
        # With zeros up to a multiple of 128 inputs, smaller matrices would take more than their values.
        assert "down" in kept(params)
        assert_kept(params, load(path, Forms(), size, layout=layout))


def int8_rows(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    scales = random.uniform(0.01, 0.02, (shape[0], 1)).astype(np.float32)
    return {"weight": random.integers(-127, 128, shape, np.int8), "weight_scale": scales}


def test_a_row_keeps_its_scale_where_heads_are_filled_up(tmp_path: Path) -> None:
    # Six heads of 64 become eight on four devices, and the first head of a device may be none of the model's.
    sizes = {64: 384, 32: 128, 16: 64}
    fixture = resized(Fixture.load("qwen3"), sizes, ".self_attn.", num_attention_heads=6, head_dim=64)
    settings = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    path = of_projections(tmp_path, fixture, settings, int8_rows)
    params = load(path, on_tpu(4), 4, layout="stacked")
    assert "o" in kept(params)
    assert_kept(params, load(path, Forms(), 4, layout="stacked"))


def test_blocks_of_fp8_are_kept_on_a_mesh(tmp_path: Path) -> None:
    fixture = resized(Fixture.load("deepseek_v3"), {100: 512}, intermediate_size=512)
    path, _ = fp8_checkpoint(tmp_path, fixture, (32, 16))
    params = load(path, on_tpu(2), 2, layout="stacked")
    assert "down" in kept(params)
    assert_kept(params, load(path, Forms(), 2, layout="stacked"))


def test_experts_in_mxfp4_are_kept(tmp_path: Path) -> None:
    path = experts_in_mxfp4(tmp_path)
    params, plain = load(path, on_tpu(1)), load(path, Forms())
    assert kept(params) == {"experts_gate_up", "experts_down"}
    assert_kept(params, plain)


@pytest.mark.parametrize(
    ("code", "group", "scale_dtype", "size", "dtype"),
    [
        (UINT4, 128, "bfloat16", 256, "bfloat16"),
        (INT8, None, "float32", 140, "bfloat16"),
        (FLOAT4, 32, "float8_e8m0fnu", 96, "float32"),
    ],
)
def test_a_matrix_is_rounded_as_elsewhere(
    code: Code, group: int | None, scale_dtype: str, size: int, dtype: str
) -> None:
    groups = ScaledGroups(code, group, scale_dtype)
    decl = ParamDecl((3, 24, size), (None, "ffn", "embed"), storage="matrix")
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=decl.shape), jnp.float32)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    form = TpuGroups(groups, CHIP, interpret=True)
    ours, theirs = (kind.keep(matrix, dict.fromkeys(kind.declare(decl), place)) for kind in (form, groups))
    assert {name: (array.shape, array.dtype) for name, array in ours.items()} == {
        name: (part.shape, part.dtype_in("float32")) for name, part in form.declare(decl).items()
    }
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, size)), jnp.float32)
    product = jax.jit(lambda x, arrays: groups.product(x, arrays, None))
    # The same as the second layer of a stack, and as three experts, of which one has no rows. In bfloat16 with groups
    # of 128, rows are multiplied by numbers alone, and the sums are scaled.
    stack = {name: jnp.stack([jnp.zeros_like(array), array]) for name, array in ours.items()}
    in_stack = jax.jit(lambda x, number: project(x, InStack(Matrix(form, stack), number)))
    np.testing.assert_allclose(in_stack(x, jnp.int32(1)), product(x, theirs), rtol=2e-5, atol=2e-5)
    starts, of_experts = jnp.array([0, 2, 2, 5], jnp.int32), x.astype(dtype)
    found = jax.jit(lambda x, starts: form.grouped_product(x, Experts([ours]), starts))(of_experts, starts)
    by_all = product(of_experts.astype(jnp.float32), theirs)
    expected = jnp.concatenate([by_all[:2, 0], by_all[2:, 2]])
    assert found.dtype == dtype
    # A result in bfloat16 is rounded once, by half of its last bit.
    rounding = 2.0**-8 if dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=rounding, atol=2e-5)


def test_is_chosen_for_tpus_where_groups_are_whole_registers() -> None:
    forms = FewBitsForms(Backend("tpu", CHIP), shards=2)
    assert forms.named("int4") == TpuGroups(ScaledGroups(UINT4, 128, "bfloat16", shards=2), CHIP)
    assert forms.named("int8") == TpuGroups(ScaledGroups(INT8, None, "float32", shards=2), CHIP)
    assert isinstance(forms.named("fp8"), TpuGroups)
    decl = ParamDecl((24, 40), (None, "ffn"), storage="matrix")
    with pytest.raises(ValueError, match="a multiple of 16 on a TPU, and one has 20: use another"):
        forms.named("int4").declare(decl)
