"""The form of experts on TPUs: what it computes, interpreted, is what XLA computes of a plain array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.forms import PLAIN, Form, Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.form import Gating
from jaxvllm.models.forms.plain import MATRIX
from jaxvllm.models.forms.tpu_experts import TpuExperts
from jaxvllm.models.ops import ExpertsWeight, InStack, OneOf, project_grouped, project_grouped_gated
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import TpuChip, chip_named
from pallas_kernels.grouped_matmul import tpu

pytestmark = pytest.mark.usefixtures("quick_fusions", "interpreted_kernels")

CHIP = chip_named("v6e")
assert isinstance(CHIP, TpuChip)
FORM = TpuExperts(CHIP, interpret=True)
STARTS = jnp.array([0, 4, 4, 10], jnp.int32)


def of(form: Form, stack: jax.Array) -> jax.Array | Matrix:
    return form.wrapped({MATRIX: stack})


def ffn(form: Form, stacked: bool, gating: Gating) -> np.ndarray:
    """Rows through the second of two layers with three experts, with biases where XLA computes the gate."""
    rng = np.random.default_rng(0)
    x, gate_up, down = (rng.standard_normal(s, np.float32) for s in ((12, 16), (2, 3, 2, 24, 16), (2, 3, 16, 24)))

    def weight(stack: np.ndarray, layer: jax.Array) -> ExpertsWeight:
        array = jnp.asarray(stack)
        return InStack(of(form, array), layer) if stacked else OneOf(tuple(of(form, one) for one in array), layer)

    @jax.jit
    def run(x: jax.Array, layer: jax.Array) -> jax.Array:
        bias = None if gating == "silu" else jnp.ones((12, 2, 24), x.dtype)
        h = project_grouped_gated(x, weight(gate_up, layer), STARTS, gating, bias)
        return project_grouped(h, weight(down, layer), STARTS)

    return np.asarray(run(x, jnp.int32(1)))[:10]


@pytest.mark.parametrize(("stacked", "gating"), [(True, "silu"), (False, "silu"), (True, "relu")])
def test_computes_what_a_plain_array_computes(stacked: bool, gating: Gating) -> None:
    np.testing.assert_allclose(ffn(FORM, stacked, gating), ffn(PLAIN, stacked, gating), rtol=1e-4, atol=1e-4)


def test_without_room_xla_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "choose_blocks", lambda *_: None)
    monkeypatch.setattr(tpu, "grouped_matmul", None)
    np.testing.assert_array_equal(ffn(FORM, True, "silu"), ffn(PLAIN, True, "silu"))


def test_is_chosen_for_tpus_alone() -> None:
    backend = Backend("tpu", CHIP)
    on_tpu = Forms.chosen(None, backend, may_turn=False)
    of_experts = TpuExperts(CHIP)
    stored = FewBitsForms(backend)
    assert on_tpu == Forms(experts=of_experts, expert_adapters=of_experts, stored=stored, pads_tables=True)
    assert not isinstance(Forms.chosen("int8", backend, may_turn=False).experts, TpuExperts)
    assert Forms.chosen(None, REFERENCE, may_turn=False) == Forms(stored=FewBitsForms())
