"""The form of matrices in few bits on GPUs: what it computes, interpreted, is what XLA computes of the same arrays."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import Form, Forms
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.gpu_groups import GpuGroups
from jaxvllm.models.forms.scaled_groups import ScaledGroups
from jaxvllm.models.forms.scaled_rows import ScaledRows
from jaxvllm.models.ops import InStack, project, project_grouped, project_grouped_gated
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.quantized_matmul import gpu, gpu_tiles
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4, INT8, UINT4

pytestmark = pytest.mark.usefixtures("quick_fusions")

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
    ):
        form = on_gpu.of(StoredAs(code, group, scale_dtype, has_zeros), group)
        assert form == GpuGroups(code, group, scale_dtype, has_zeros, 2, chip=CHIP)
    assert on_gpu.of(StoredAs(FLOAT4, 16, "float32"), 16) is None  # NVFP4
    assert isinstance(FewBitsForms().of(StoredAs(INT8, None, "float32"), None), ScaledRows)
    # The second matrix of gpt-oss on one GPU, and on two, whose rows of 720 bytes no swizzle divides.
    assert [FORM.takes(inputs) for inputs in (2880, 1440)] == [True, False]
    forms = Forms.chosen("int4", Backend("gpu", CHIP), may_turn=False)
    assert forms.layers == forms.experts == GpuGroups(UINT4, 128, "bfloat16", chip=CHIP)
