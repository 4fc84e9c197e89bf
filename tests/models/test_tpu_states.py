"""States by the kernels for TPUs: what they compute, interpreted, is what plain XLA computes."""

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
from jaxvllm.models.recurrence import RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.models.tpu_states import TpuStates
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.layer_cache import LayerCache
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention import RaggedRows

INTERPRETED = Backend("tpu", chip_named("v6e"), interpret=True)
HEADS, PAGE_SIZE, PLACE = 1, 4, 1
# The first row begins, the second goes on within a page, the third on a new page; the fourth has no token.
STARTS, LENGTHS, TOKENS = (0, 6, 8, 0), (7, 3, 1, 0), 16
CHANNELS = 384
BY_CHANNEL = RecurrentRule(CausalConv(CHANNELS, 4), ChannelDelta(128))
# A layer of linear attention, and one of attention, which every model has.
QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
}


def rows_with(page_table: jax.Array) -> RaggedRows:
    starts, lengths = (jnp.asarray(numbers, jnp.int32) for numbers in (STARTS, LENGTHS))
    return RaggedRows.build(page_table, starts, lengths, TOKENS)


def random_tokens(**gates: tuple[int, ...]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The weights of a convolution, and tokens."""
    random = np.random.default_rng(0)
    tokens = {name: random.uniform(0.1, 1, (TOKENS, HEADS, *shape)) for name, shape in gates.items()}
    tokens |= {"g": -tokens["g"], "channels": random.normal(size=(TOKENS, HEADS, CHANNELS))}
    taps = jnp.asarray(random.normal(size=(HEADS, 4, CHANNELS)), jnp.float32)
    return {"taps": taps}, {name: jnp.asarray(x, jnp.float32) for name, x in tokens.items()}


def random_pages(memory: StateMemory, num_pages: int) -> jax.Array:
    """The last rows of a page are empty."""
    random = np.random.default_rng(1)
    return memory.pack(
        tuple(jnp.asarray(random.normal(size=(2, num_pages, HEADS, *part)), jnp.float32) for part in memory.rule.parts)
    )


def assert_same(got: Any, expected: Any) -> None:
    (read, pages), (expected_read, expected_pages) = got, expected
    np.testing.assert_allclose(read[: sum(LENGTHS)], expected_read[: sum(LENGTHS)], atol=1e-5)
    np.testing.assert_allclose(pages[:, 1:], expected_pages[:, 1:], atol=2e-5)


def test_kimi_delta_attention_is_what_xla_computes() -> None:
    memory, (weights, tokens) = StateMemory(HEADS, BY_CHANNEL), random_tokens(g=(128,), beta=())
    pages, rows = random_pages(memory, 13), rows_with(1 + jnp.arange(12, dtype=jnp.int32).reshape(4, 3))
    states = TpuStates.of(memory, INTERPRETED)
    assert states is not None
    got = jax.jit(states)(pages, PLACE, states.plan(rows, PAGE_SIZE), weights, tokens)
    columns = Columns(rows, PAGE_SIZE)
    assert_same(got, jax.jit(lambda: memory.advance(pages, PLACE, columns, weights, tokens))())


def test_layers_of_the_gated_delta_rule_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, (weights, tokens) = model_spec(QWEN), random_tokens(g=(1,), beta=(1,))
    shape = CacheShape(13, PAGE_SIZE, num_slots=4, max_pages=3, dtype=jnp.dtype(jnp.bfloat16), step_tokens=TOKENS)
    _, group = shape.groups(spec)
    assert isinstance(group.memory, StateMemory)
    states = random_pages(group.memory, 13)[:1]
    table = jnp.repeat(1 + jnp.arange(12, dtype=jnp.int32).reshape(4, 1, 3), 2, axis=1)

    def recur(backend: Backend) -> tuple[jax.Array, jax.Array]:
        first = jnp.zeros(shape.groups(spec)[0].memory.pages(1, 13, PAGE_SIZE, jnp.bfloat16, backend).shape)
        cache = LayerCache(spec, shape, rows_with(table), (first, states), jnp.bfloat16, backend)
        given: Any = SimpleNamespace(memory=spec.layers[0].memory, number=0)
        read, kept = cache.recur(cache.begin, given, weights, tokens)
        return read, kept.pages[1]

    expected = jax.jit(recur, static_argnums=0)(REFERENCE)
    monkeypatch.setattr(StateMemory, "advance", None)
    assert_same(jax.jit(recur, static_argnums=0)(INTERPRETED), expected)


def test_other_states_and_other_backends_have_none() -> None:
    gated = RecurrentRule(CausalConv(CHANNELS, 4), GatedDelta(1, 128, 128))
    small = RecurrentRule(CausalConv(22, 4), GatedDelta(2, 6, 5))
    window = RecurrentRule(CausalConv(10, 3), WindowAlone())
    for rule, backend in [(gated, REFERENCE), (small, INTERPRETED), (window, INTERPRETED)]:
        assert TpuStates.of(StateMemory(HEADS, rule), backend) is None
