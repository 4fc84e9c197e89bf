"""The side store on the device: what is packed is what a step reads, and engines without a store have nothing of it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.core.side_input import SideInput
from jaxvllm.core.side_store import SideRows
from jaxvllm.models.decoder import embed_tokens
from jaxvllm.models.families import model_spec
from jaxvllm.models.params import abstract_params
from jaxvllm.runtime.batch import packed_size
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.side_rows import SIDE_BATCH, SIDE_ROWS, SideShape, store_side_rows
from jaxvllm.runtime.state import new_state, state_bytes
from jaxvllm.runtime.step import forward
from jaxvllm.runtime.step_model import StepModel
from pallas_kernels.backend import REFERENCE
from sharding.placement import mesh_of
from tests.models.fixture import Fixture
from tests.runtime.test_step_memory import SHAPE

pytestmark = pytest.mark.usefixtures("quick_programs")

STORE = SideShape(num_rows=600, hidden_size=5, dtype=jnp.dtype(jnp.bfloat16))


def test_rows_get_the_values_that_were_packed_and_others_keep_theirs() -> None:
    random = np.random.default_rng(0)
    state = STORE.new() | {"length": jnp.zeros(3)}
    expected = np.zeros((600, 5), np.float32)
    for count in (1, SIDE_BATCH, SIDE_BATCH + 3):
        rows = random.choice(600, count, replace=False).astype(np.int32)
        values = random.normal(size=(count, 5)).astype(np.float32)
        packed = STORE.pack(SideRows(rows, SideInput.of(0, values)))
        assert len(packed) == -(-count // SIDE_BATCH)
        for words in packed:
            state = store_side_rows(state, words)
        expected[rows] = values.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(state[SIDE_ROWS], np.float32), expected)
    assert store_side_rows(state, STORE.nothing()).keys() == {SIDE_ROWS, "length"}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_rows_replace_what_the_table_gives_scaled_and_before_positions_are_added(family: str) -> None:
    spec = model_spec(Fixture.load(family).config, 64)
    random = np.random.default_rng(1)
    names = {"embed": (spec.vocab_size, spec.hidden_size), "positions": (80, spec.hidden_size)}
    params = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in names.items()}
    tokens, positions = jnp.array([3, 1, 4, 1, 5]), jnp.array([9, 8, 7, 0, 1])
    expected = embed_tokens(params, spec, tokens, positions)
    store = random.permutation(7).astype(np.int32)[:5]
    rows = np.full((7, spec.hidden_size), np.nan, np.float32)
    rows[store] = np.asarray(params["embed"])[np.asarray(tokens)] * spec.embed_scale
    inputs = jnp.where(jnp.array([True, False, True, True, False]), -1 - store, tokens)
    given = embed_tokens(params, spec, inputs, positions, side_rows=jnp.asarray(rows))
    np.testing.assert_allclose(given, expected, rtol=1e-6)
    assert (spec.embed_scale != 1) == (family == "gemma3") and (spec.positions is not None) == (family == "gpt2")


def test_a_step_without_a_store_has_no_argument_and_no_operation_of_it() -> None:
    spec, mesh = model_spec(Fixture.load("llama").config, 64), mesh_of(jax.devices()[0])
    params = abstract_params(spec, jnp.dtype(jnp.float32), "separate", mesh)
    bucket, programs = Bucket(8, 2), []
    for side in (None, SideShape(40, spec.hidden_size, jnp.dtype(jnp.float32))):
        shape = replace(SHAPE, side=side)
        state = shape.state(spec, mesh)
        packed = jax.ShapeDtypeStruct((packed_size(bucket, shape.sizes(spec)),), jnp.int32)
        step = partial(forward, model=StepModel(spec, shape, REFERENCE), bucket=bucket)
        programs.append(jax.make_jaxpr(step)(params, shape.pages(spec, REFERENCE, mesh), state, packed).jaxpr)
        assert (SIDE_ROWS in state) == (side is not None)
    without, with_store = programs
    assert len(without.invars) == len(with_store.invars) - 1
    added = len(with_store.eqns) - len(without.eqns)
    assert 0 < added < 12, "of a step, the embeddings and the history differ"
    assert not any(var.aval.shape == (40, spec.hidden_size) for eqn in without.eqns for var in eqn.outvars)
    sizes = [replace(SHAPE, side=side).sizes(spec) for side in (None, STORE)]
    assert state_bytes(sizes[1]) - state_bytes(sizes[0]) == 600 * 5 * 2
    assert new_state(sizes[0]).keys() == new_state(sizes[1]).keys() - {SIDE_ROWS}
