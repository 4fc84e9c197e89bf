"""States by the kernels for TPUs: what they compute, interpreted, is what plain XLA computes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.families import model_spec
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba import ChannelScan
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.models.tpu_states import TpuStates
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.layer_cache import LayerCache
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention import RaggedRows

pytestmark = pytest.mark.usefixtures("interpreted_kernels")

INTERPRETED = Backend("tpu", chip_named("v6e"), interpret=True)
HEADS, PAGE_SIZE, PLACE = 1, 4, 1
# The first row begins, the second goes on within a page, the third on a new page; the fourth has no token.
STARTS, LENGTHS, TOKENS = (0, 6, 8, 0), (7, 3, 1, 0), 16
CHANNELS = 384
BY_CHANNEL = RecurrentRule(CausalConv(CHANNELS, 4), ChannelDelta(128))
SCAN = RecurrentRule(CausalConv(CHANNELS, 3, has_bias=True), SelectiveScan(2, 64, 128))
# A layer that keeps a state, and one of attention.
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 12,
}
QWEN = SMALL | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
}
BAMBA = SMALL | {
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1],
    "mamba_n_heads": 2,
    "mamba_n_groups": HEADS,
    "mamba_d_state": 128,
    "mamba_conv_bias": False,
}


def rows_with(page_table: jax.Array) -> RaggedRows:
    starts, lengths = (jnp.asarray(numbers, jnp.int32) for numbers in (STARTS, LENGTHS))
    return RaggedRows.build(page_table, starts, lengths, TOKENS)


def random_tokens(
    size: int, weights: dict[str, tuple[int, ...]], gates: dict[str, tuple[int, ...]]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The weights of a rule whose convolution sees `size` tokens, with others of such shapes, and tokens."""
    random = np.random.default_rng(0)
    tokens = {name: random.uniform(0.1, 1, (TOKENS, HEADS, *shape)) for name, shape in gates.items()}
    tokens |= {name: -tokens[name] for name in {"g"} & set(gates)}
    tokens |= {"channels": random.normal(size=(TOKENS, HEADS, CHANNELS))}
    shapes = {"taps": (size, CHANNELS), **weights}
    of_rule = {name: random.normal(size=(HEADS, *shape)) for name, shape in shapes.items()}
    of_rule |= {name: -np.abs(of_rule[name]) for name in {"pace"} & set(weights)}
    in_float32: Any = partial(jax.tree.map, partial(jnp.asarray, dtype=jnp.float32))
    return in_float32(of_rule), in_float32(tokens)


def random_pages(memory: StateMemory, num_pages: int) -> jax.Array:
    """The last rows of a page are empty."""
    random = np.random.default_rng(1)
    return memory.pack(
        tuple(jnp.asarray(random.normal(size=(2, num_pages, HEADS, *part)), jnp.float32) for part in memory.rule.parts)
    )


def assert_same(got: Any, expected: Any) -> None:
    (read, pages), (expected_read, expected_pages) = got, expected
    np.testing.assert_allclose(read[: sum(LENGTHS)], expected_read[: sum(LENGTHS)], atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(pages[:, 1:], expected_pages[:, 1:], atol=2e-5)


@pytest.mark.parametrize(
    ("rule", "size", "weights", "gates"),
    [
        (BY_CHANNEL, 4, {}, {"g": (128,), "beta": ()}),
        (SCAN, 3, {"bias": (CHANNELS,), "skip": (2,)}, {"g": (2,), "dt": (2,)}),
        (
            RecurrentRule(None, ChannelScan(CHANNELS, 16)),
            4,
            {"pace": (16, CHANNELS), "skip": (CHANNELS,)},
            {"dt": (CHANNELS,), "b": (16,), "c": (16,)},
        ),
        (RecurrentRule(CausalConv(CHANNELS, 4, has_bias=True), WindowAlone()), 4, {"bias": (CHANNELS,)}, {}),
        (RecurrentRule(CausalConv(CHANNELS, 3, has_activation=False), WindowAlone()), 3, {}, {}),
    ],
    ids=["Kimi delta attention", "Mamba-2", "Mamba", "Mamba's window", "LFM2"],
)
def test_is_what_xla_computes(rule: RecurrentRule, size: int, weights: Any, gates: Any) -> None:
    memory, (of_rule, tokens) = StateMemory(HEADS, rule), random_tokens(size, weights, gates)
    pages, rows = random_pages(memory, 13), rows_with(1 + jnp.arange(12, dtype=jnp.int32).reshape(4, 3))
    states = TpuStates.of(memory, INTERPRETED)
    assert states is not None
    got = jax.jit(states)(pages, PLACE, states.plan(rows, PAGE_SIZE), of_rule, tokens)
    columns = Columns(rows, PAGE_SIZE)
    assert_same(got, jax.jit(lambda: memory.advance(pages, PLACE, columns, of_rule, tokens))())


@pytest.mark.parametrize(
    ("config", "weights", "gates"),
    [(QWEN, {}, {"g": (1,), "beta": (1,)}), (BAMBA, {"skip": (2,)}, {"g": (2,), "dt": (2,)})],
    ids=["Qwen 3.5", "Bamba"],
)
def test_layers_use_them(config: dict[str, Any], weights: Any, gates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, (of_rule, tokens) = model_spec(config), random_tokens(4, weights, gates)
    shape = CacheShape(13, PAGE_SIZE, num_slots=4, max_pages=3, dtype=jnp.dtype(jnp.bfloat16), step_tokens=TOKENS)
    _, group = shape.groups(spec)
    assert isinstance(group.memory, StateMemory)
    states = random_pages(group.memory, 13)[:1]
    table = jnp.repeat(1 + jnp.arange(12, dtype=jnp.int32).reshape(4, 1, 3), 2, axis=1)

    def recur(backend: Backend) -> tuple[jax.Array, jax.Array]:
        first = jnp.zeros(shape.groups(spec)[0].memory.pages(1, 13, PAGE_SIZE, jnp.bfloat16, backend).shape)
        cache = LayerCache(spec, shape, rows_with(table), (first, states), jnp.bfloat16, backend)
        given: Any = SimpleNamespace(memory=spec.layers[0].memory, number=0)
        read, kept = cache.recur(cache.begin, given, of_rule, tokens)
        return read, kept.pages[1]

    expected = jax.jit(recur, static_argnums=0)(REFERENCE)
    monkeypatch.setattr(StateMemory, "advance", None)
    assert_same(jax.jit(recur, static_argnums=0)(INTERPRETED), expected)


def test_other_states_and_other_backends_have_none() -> None:
    gated = RecurrentRule(CausalConv(CHANNELS, 4), GatedDelta(1, 128, 128))
    small = RecurrentRule(CausalConv(22, 4), GatedDelta(2, 6, 5))
    window = RecurrentRule(CausalConv(10, 3), WindowAlone())
    narrow = RecurrentRule(CausalConv(160, 4), SelectiveScan(2, 64, 16))
    for rule, backend in [
        (gated, REFERENCE),
        (SCAN, REFERENCE),
        (small, INTERPRETED),
        (narrow, INTERPRETED),
        (window, INTERPRETED),
        (RecurrentRule(None, ChannelScan(192, 16)), INTERPRETED),
    ]:
        assert TpuStates.of(StateMemory(HEADS, rule), backend) is None
