"""States on GPUs: what the kernel makes of a step, interpreted, is what plain XLA makes of it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import gpu_states
from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.gpu_channels import GpuChannels
from jaxvllm.models.gpu_states import GpuStates
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba import ChannelScan
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_kernel import state_kernel
from jaxvllm.models.state_memory import Columns, StateMemory
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention import RaggedRows

pytestmark = pytest.mark.usefixtures("interpreted_kernels")

HEADS, PAGE_SIZE, PLACE = 2, 4, 1
BACKEND = Backend("gpu", chip_named("h200"), interpret=True)


@dataclass(frozen=True, eq=False)
class Layer:
    """A memory, the shapes of its weights beside the taps [K, ..], and of what a token has beside channels."""

    rule: RecurrentRule
    weights: dict[str, tuple[int, ...]]
    token: dict[str, tuple[int, ...]]

    @property
    def memory(self) -> StateMemory:
        return StateMemory(HEADS, self.rule)


LAYERS = {
    "gated delta": Layer(
        RecurrentRule(CausalConv(256, 4), GatedDelta(values_per_key=2, key_size=64, value_size=64)),
        {},
        {"g": (2,), "beta": (2,)},
    ),
    "Kimi delta": Layer(RecurrentRule(CausalConv(192, 4), ChannelDelta(64)), {}, {"g": (64,), "beta": ()}),
    "Mamba-2": Layer(
        RecurrentRule(CausalConv(256, 3, has_bias=True), SelectiveScan(num_heads=2, head_size=64, state_size=64)),
        {"bias": (256,), "skip": (2,)},
        {"g": (2,), "dt": (2,)},
    ),
    "Mamba": Layer(
        RecurrentRule(None, ChannelScan(num_channels=64, state_size=16)),
        {"pace": (16, 64), "skip": (64,)},
        {"dt": (64,), "b": (16,), "c": (16,)},
    ),
    # Its window fills its page: the kernel leaves padding of a page as it was.
    "window": Layer(
        RecurrentRule(CausalConv(256, 5, has_bias=True, has_activation=False), WindowAlone()), {"bias": (256,)}, {}
    ),
}


@partial(jax.jit, static_argnums=(0, 1))
def advance(layer: Layer, by_kernel: bool, pages: Any, rows: RaggedRows, weights: Any, tokens: Any) -> Any:
    if not by_kernel:
        return layer.memory.advance(pages, PLACE, Columns(rows, PAGE_SIZE), weights, tokens)
    kernel = state_kernel(layer.memory, BACKEND)
    assert kernel is not None
    return kernel(pages, jnp.int32(PLACE), kernel.plan(rows, PAGE_SIZE), weights, tokens)


# Rows that begin, go on within a page and on a new one, and have no token, of which two go by chunks; and rows that
# decode.
@pytest.mark.parametrize(
    ("starts", "lens", "num_tokens"),
    [((0, 6, 8, 0, 8), (17, 3, 1, 0, 19), 48), ((3, 0, 4, 0), (1, 0, 1, 1), 4)],
    ids=["mixed", "decode"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_is_what_xla_computes(
    name: str,
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    num_tokens: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_states, "CHUNKED_STEP", 48)  # the interpreter would take long for so many tokens
    layer, rng = LAYERS[name], np.random.default_rng(0)
    conv, parts = layer.rule.conv, layer.rule.parts

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    weights = {} if conv is None else {"taps": random(HEADS, conv.size, conv.channels)}
    weights |= {key: random(HEADS, *shape) for key, shape in layer.weights.items()}
    if "pace" in weights:
        weights["pace"] = -np.abs(weights["pace"])
    tokens = {key: rng.uniform(0.1, 1, (num_tokens, HEADS, *shape)) for key, shape in layer.token.items()}
    tokens = {key: np.asarray(-x if key == "g" else x, np.float32) for key, x in tokens.items()}
    tokens |= {key: np.repeat(tokens[key][:, :1], HEADS, axis=1) for key in tokens.keys() & {"b", "c"}}
    tokens[CHANNELS] = random(num_tokens, HEADS, parts[0][-1] if conv is None else conv.channels)
    table = 1 + jnp.arange(8 * len(starts), dtype=jnp.int32).reshape(-1, 8)
    rows = RaggedRows.build(table, jnp.asarray(starts), jnp.asarray(lens), num_tokens)
    pages = random(*layer.memory.pages(2, table.size + 1, PAGE_SIZE, jnp.float32, BACKEND).shape)
    (expected, expected_pages), (read, got) = (
        advance(layer, by_kernel, pages, rows, weights, tokens) for by_kernel in (False, True)
    )
    is_real = np.asarray(rows.is_real())
    np.testing.assert_allclose(np.asarray(read)[is_real], np.asarray(expected)[is_real], rtol=1e-5, atol=1e-5)
    assert read.shape == expected.shape and not np.asarray(read)[~is_real].any()
    np.testing.assert_allclose(np.asarray(got)[:, 1:], np.asarray(expected_pages)[:, 1:], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[:, 0], pages[:, 0])  # which is of nobody
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "rule",
    [
        RecurrentRule(CausalConv(10, 3), WindowAlone()),
        RecurrentRule(CausalConv(192, 3), WindowAlone()),
        RecurrentRule(None, ChannelScan(num_channels=32, state_size=32)),
        # A page has no whole number of rows of all channels.
        RecurrentRule(None, ChannelScan(num_channels=192, state_size=8)),
        RecurrentRule(CausalConv(44, 4), GatedDelta(values_per_key=2, key_size=12, value_size=10)),
        # Its rows take two rows of a page.
        RecurrentRule(CausalConv(544, 4), SelectiveScan(num_heads=2, head_size=16, state_size=256)),
    ],
)
def test_what_the_kernels_do_not_take(rule: RecurrentRule) -> None:
    assert state_kernel(StateMemory(HEADS, rule), BACKEND) is None


def test_other_chips_have_none() -> None:
    for name, kind in (("gated delta", GpuStates), ("Mamba", GpuChannels)):
        memory = LAYERS[name].memory
        assert kind.of(memory, REFERENCE) is kind.of(memory, Backend("tpu", chip_named("v6e"))) is None
