"""Which programs a step consists of, and when each of them is compiled. Nothing is compiled here."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxvllm.models.families import model_spec
from jaxvllm.models.params import abstract_params
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import REFERENCE
from sharding.placement import mesh_of
from tests.models.fixture import Fixture

SHAPE = CacheShape(num_pages=4, page_size=16, num_slots=4, max_pages=2, dtype=jnp.dtype(jnp.float32), step_tokens=8)


@pytest.mark.parametrize(
    ("bucket", "at_once", "later"),
    [
        (Bucket(2, 2), ["decode"], []),
        (Bucket(8, 2), ["forward", "sample_rows"], ["distribute", "pick_rows"]),
        # A row asked for this bucket, and may want distributions in the step at hand.
        (Bucket(2, 2, is_split=True), ["distribute", "forward", "pick_rows", "sample_rows"], []),
    ],
    ids=str,
)
def test_distributions_are_compiled_when_they_are_needed(bucket: Bucket, at_once: list[str], later: list[str]) -> None:
    spec, mesh = model_spec(Fixture.load("llama").config), mesh_of(jax.devices()[0])
    made: list[str] = []

    def make(recipe: Recipe) -> Any:
        run = recipe.run
        while isinstance(run, partial):
            run = run.func
        made.append(run.__name__)

    params = abstract_params(spec, jnp.float32, "separate", mesh)
    compiler = StepCompiler(params, SHAPE.pages(spec, REFERENCE, mesh), spec, SHAPE, REFERENCE, mesh, make=make)
    compiler.compile(bucket)
    assert sorted(made) == at_once
    made.clear()
    compiler.compile_readouts()
    compiler.compile_readouts()
    assert sorted(made) == later
