"""Which programs a step consists of, and when each of them is compiled. Nothing is compiled here."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
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

# Stands for a program that needs no memory. `StepCompiler` asks those that score prompts how much they need.
_SIZES = dict.fromkeys(("temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"), 0)
COMPILED = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**_SIZES))


def compiler_with(make: Callable[[Recipe], Any]) -> StepCompiler:
    """Returns the compiler of a small Llama, which gives recipes to `make`."""
    spec, mesh = model_spec(Fixture.load("llama").config), mesh_of(jax.devices()[0])
    params = abstract_params(spec, jnp.float32, "separate", mesh)
    return StepCompiler(params, SHAPE.pages(spec, REFERENCE, mesh), spec, SHAPE, REFERENCE, mesh, make=make)


@pytest.mark.parametrize(
    ("bucket", "at_once", "later"),
    [
        (Bucket(2, 2), ["decode"], []),
        (Bucket(8, 2), ["forward", "pick_tokens", "sample_rows", "score"], ["distribute", "pick_rows"]),
        # A row asked for this bucket, and may want distributions in the step at hand.
        (
            Bucket(2, 2, is_split=True),
            ["distribute", "forward", "pick_rows", "pick_tokens", "sample_rows", "score"],
            [],
        ),
    ],
    ids=str,
)
def test_distributions_are_compiled_when_they_are_needed(bucket: Bucket, at_once: list[str], later: list[str]) -> None:
    made: list[str] = []

    def make(recipe: Recipe) -> Any:
        run = recipe.run
        while isinstance(run, partial):
            run = run.func
        made.append(run.__name__)
        return COMPILED

    compiler = compiler_with(make)
    compiler.compile(bucket)
    assert sorted(made) == at_once
    made.clear()
    compiler.compile_readouts()
    compiler.compile_readouts()
    assert sorted(made) == later


@pytest.mark.parametrize(
    ("is_plain", "changed"),
    [(True, {"history", "is_over", "length"}), (False, {"history", "is_over", "length", "output_counts", "is_masked"})],
)
def test_a_plain_sampler_counts_no_tokens_and_clears_no_masks(is_plain: bool, changed: set[str]) -> None:
    """No row of a plain step has penalties or a mask, so its program returns these arrays of the state as they are."""

    def make(recipe: Recipe) -> Any:
        program = jax.make_jaxpr(recipe.run)(*recipe.arguments).jaxpr
        head, state, _ = recipe.arguments
        given = program.invars[len(jax.tree.leaves(head)) :][: len(state)]
        results = program.outvars[: len(state)]
        return {name for name, before, after in zip(sorted(state), given, results, strict=True) if before is not after}

    made: Any = compiler_with(make).compile_sampler(2, is_plain)
    assert made == changed
