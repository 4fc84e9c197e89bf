"""What the decoder promises besides the numbers: both layouts agree, and windows cost nothing unless used."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.decoder import embed_tokens, forward, run_layers
from jaxvllm.models.families import model_spec
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.params import (
    Layout,
    abstract_params,
    declare,
    declare_layer,
    num_parameters,
)
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW
from sharding.placement import mesh_of
from sharding.rules import partition_spec
from tests.models.changed import in_windows
from tests.models.dense import dense_attend, dense_logits
from tests.models.fixture import NAMES, Fixture

pytestmark = pytest.mark.usefixtures("quick_fusions")


def spec_of(name: str) -> ModelSpec:
    return model_spec(Fixture.load(name).config)


def dummy(spec: ModelSpec, layout: Any, dtype: Any = jnp.float32, seed: int = 0) -> Any:
    return checkpoint.load(Path(), spec, dtype=dtype, layout=layout, load_format="dummy", seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_declared_once(name: str) -> None:
    spec = spec_of(name)
    for decl in (declare(spec) | declare_layer(spec, 0)).values():
        partition_spec(decl.axes)
    layouts: list[Layout] = ["separate", "stacked"]
    for layout in layouts:
        abstract = abstract_params(spec, jnp.bfloat16, layout, mesh_of(jax.devices()[0]))
        assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == num_parameters(spec)


def test_abstract_parameters_are_like_real_ones() -> None:
    spec = spec_of("gemma3")
    layouts: list[Layout] = ["separate", "stacked"]
    for layout in layouts:
        abstract = abstract_params(spec, jnp.bfloat16, layout, mesh_of(jax.devices()[0]))
        real = dummy(spec, layout, jnp.bfloat16)
        chex.assert_trees_all_equal_shapes_and_dtypes(abstract, real)
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x.sharding, tree) for tree in (abstract, real)))


def test_dummy_weights_are_the_same_in_both_layouts_and_differ_by_seed() -> None:
    spec = spec_of("llama")
    separate, stacked = dummy(spec, "separate"), dummy(spec, "stacked")
    restacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *separate["layers"])
    chex.assert_trees_all_equal(separate | {"layers": restacked}, stacked)
    assert not np.array_equal(separate["embed"], dummy(spec, "separate", seed=1)["embed"])
    assert not np.array_equal(separate["layers"][0]["o"], separate["layers"][1]["o"])
    logits = np.asarray(dense_logits(separate, spec, [1, 2, 3]))
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize("layout", ["separate", "stacked"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_what_attend_is_given(name: str, layout: Layout) -> None:
    spec = spec_of(name)
    shapes, windows = set(), set()

    def attend(kv: Any, given: LayerInput, q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> Any:
        chex.assert_rank(given.number, 0)
        shapes.add((q.shape, k.shape, v.shape))
        windows.add(given.window if isinstance(given.window, int) else None)
        return q, kv

    tokens = jnp.zeros(5, jnp.int32)
    params = abstract_params(spec, jnp.float32, layout, mesh_of(jax.devices()[0]))
    jax.eval_shape(lambda params: forward(params, spec, tokens, tokens, (), attend), params)
    attention = spec.layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_size
    assert shapes == {((5, H, D), (5, K, D), (5, K, D))}
    # A window is a number that the compiler knows, where layers differ in it too: a run of equal layers is one loop.
    assert windows == {NO_WINDOW if window is None else window for window in spec.seen_windows}


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_a_program_does_not_grow_with_the_layers_but_by_their_matmuls(layout: Layout) -> None:
    def lines(num_layers: int) -> int:
        spec = in_windows(spec_of("llama"), *[None] * num_layers)
        params = abstract_params(spec, jnp.float32, layout, mesh_of(jax.devices()[0]))
        tokens = jnp.zeros(5, jnp.int32)
        program = jax.jit(lambda params: forward(params, spec, tokens, tokens, (), dense_attend))
        return len(program.lower(params).as_text().splitlines())

    matmuls = 4  # of a layer: qkv, o, gate and up, down
    grown = lines(24) - lines(4)
    assert grown == 0 if layout == "stacked" else 0 < grown < 20 * matmuls * 8


def test_bfloat16_runs_with_norms_and_logits_in_float32() -> None:
    spec = spec_of("gemma3")
    exact = dense_logits(dummy(spec, "separate"), spec, [5, 6, 7])
    rounded = dense_logits(dummy(spec, "separate", jnp.bfloat16), spec, [5, 6, 7])
    assert rounded.dtype == jnp.float32
    assert np.abs(np.asarray(exact - rounded)).max() < 0.1 * np.asarray(exact).std() + 0.05


def test_the_cache_is_carried_through_the_layers() -> None:
    spec = spec_of("llama")

    def attend(kv: jax.Array, given: LayerInput, *rest: Any, **options: Any) -> Any:
        out, _ = dense_attend((), given, *rest, **options)
        return out, kv.at[given.number].add(1)

    tokens = jnp.zeros(5, jnp.int32)
    for layout in ("separate", "stacked"):
        _, kv = forward(dummy(spec, layout), spec, tokens, tokens, jnp.zeros(4, jnp.int32), attend)
        assert kv.tolist() == [1, 1, 1, 0]


def test_experts_of_the_last_layer_compute_the_tokens_that_are_read() -> None:
    spec = spec_of("olmoe")
    params = dummy(spec, "separate")
    tokens = positions = jnp.arange(12, dtype=jnp.int32)

    @jax.jit
    def run(is_read: jax.Array) -> jax.Array:
        x = embed_tokens(params, spec, tokens, positions)
        every = jnp.ones(len(tokens), bool)
        return run_layers(params, spec, x, positions, (), dense_attend, is_real=every, is_read=is_read)[0]

    some = np.arange(12) % 5 == 3
    whole, part = np.asarray(run(np.ones(12, bool))), np.asarray(run(some))
    np.testing.assert_array_equal(part[some], whole[some])
    assert (np.abs(part - whole)[~some].max(-1) > 1e-3).all()  # no expert was added
