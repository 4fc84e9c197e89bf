"""States by the kernels for TPUs: what they compute, interpreted, is what plain XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.recurrence import RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.models.tpu_states import TpuStates
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention import RaggedRows

INTERPRETED = Backend("tpu", chip_named("v6e"), interpret=True)
HEADS, PAGE_SIZE, PLACE = 1, 4, 1
GATED = RecurrentRule(CausalConv(384, 4), GatedDelta(1, 128, 128))
BY_CHANNEL = RecurrentRule(CausalConv(384, 4), ChannelDelta(128))


@pytest.mark.parametrize(
    ("rule", "gates"), [(GATED, {"g": (1,), "beta": (1,)}), (BY_CHANNEL, {"g": (128,), "beta": ()})]
)
def test_a_kernel_computes_what_xla_computes(rule: RecurrentRule, gates: dict[str, tuple[int, ...]]) -> None:
    memory, random = StateMemory(HEADS, rule), np.random.default_rng(0)
    before = memory.pack(tuple(jnp.asarray(random.normal(size=(2, 13, HEADS, *p)), jnp.float32) for p in rule.parts))
    starts, lengths = (jnp.asarray(x, jnp.int32) for x in ((0, 6, 8, 0), (7, 3, 1, 0)))
    rows = RaggedRows.build(1 + jnp.arange(12, dtype=jnp.int32).reshape(4, 3), starts, lengths, 16)
    tokens = {
        name: jnp.asarray(random.uniform(0.1, 1, (16, HEADS, *shape)), jnp.float32) for name, shape in gates.items()
    }
    tokens = {**tokens, "g": -tokens["g"], "channels": jnp.asarray(random.normal(size=(16, HEADS, 384)), jnp.bfloat16)}
    weights = {"taps": jnp.asarray(random.normal(size=(HEADS, 4, 384)), jnp.float32)}
    kernel = TpuStates.of(memory, INTERPRETED)
    assert kernel is not None
    read, after = jax.jit(kernel)(before, PLACE, kernel.plan(rows, PAGE_SIZE), weights, tokens)
    columns = Columns(rows, PAGE_SIZE)
    expected, expected_after = jax.jit(lambda: memory.advance(before, PLACE, columns, weights, tokens))()
    np.testing.assert_allclose(read[:11], expected[:11], atol=1e-5)
    np.testing.assert_allclose(after[:, 1:], expected_after[:, 1:], atol=2e-5)


def test_other_states_and_other_backends_have_none() -> None:
    small = RecurrentRule(CausalConv(22, 4), GatedDelta(2, 6, 5))
    for rule, backend in [
        (GATED, REFERENCE),
        (small, INTERPRETED),
        (RecurrentRule(CausalConv(10, 3), WindowAlone()), INTERPRETED),
    ]:
        assert TpuStates.of(StateMemory(HEADS, rule), backend) is None
