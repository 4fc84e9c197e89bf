"""The form of experts on GPUs: what it computes, interpreted, is what XLA computes of a plain array."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.forms import PLAIN, Form, Forms
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.gpu_experts import GpuExperts
from jaxvllm.models.forms.plain import MATRIX
from jaxvllm.models.ops import InStack, project_grouped, project_grouped_gated
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.grouped_matmul import gpu

pytestmark = pytest.mark.usefixtures("quick_fusions", "interpreted_kernels")

CHIP = chip_named("h200")
assert isinstance(CHIP, GpuChip)
FORM = GpuExperts(replace(CHIP, num_sms=2), interpret=True)
STARTS = jnp.array([0, 4, 4, 10], jnp.int32)


def ffn(form: Form) -> np.ndarray:
    """Rows through the second of two layers with three experts."""
    rng = np.random.default_rng(0)
    shapes = (12, 64), (2, 3, 2, 64, 64), (2, 3, 64, 64)
    x, gate_up, down = (jnp.asarray(rng.standard_normal(shape, np.float32) / 8, jnp.bfloat16) for shape in shapes)

    @jax.jit
    def run(x: jax.Array, layer: jax.Array) -> jax.Array:
        gate_up_matrices, down_matrices = (InStack(form.wrapped({MATRIX: w}), layer) for w in (gate_up, down))
        h = project_grouped_gated(x, gate_up_matrices, STARTS, "gelu_tanh")
        return project_grouped(h, down_matrices, STARTS)

    return np.asarray(run(x, jnp.int32(1)), np.float32)[:10]


def test_computes_what_a_plain_array_computes() -> None:
    expected = ffn(PLAIN)
    np.testing.assert_allclose(ffn(FORM), expected, rtol=0, atol=0.01 * np.abs(expected).max())


def test_what_the_kernel_does_not_take_xla_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "choose_tiles", lambda *_: None)
    monkeypatch.setattr(gpu, "grouped_matmul", None)
    np.testing.assert_array_equal(ffn(FORM), ffn(PLAIN))


def test_is_chosen_for_gpus_alone() -> None:
    backend = Backend("gpu", CHIP)
    on_gpu = Forms.chosen(None, backend, may_turn=False)
    of_experts = GpuExperts(CHIP)
    assert on_gpu == Forms(experts=of_experts, expert_adapters=of_experts, stored=FewBitsForms(backend))
    assert not isinstance(Forms.chosen("int8", backend, may_turn=False).experts, GpuExperts)
    assert Forms.chosen(None, REFERENCE, may_turn=False) == Forms(stored=FewBitsForms())
