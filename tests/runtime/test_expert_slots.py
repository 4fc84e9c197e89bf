"""Experts that move between devices: each slot then holds the weights of its expert, in every form and layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxvllm.core.expert_placement import NOTHING, experts_in
from jaxvllm.models import checkpoint
from jaxvllm.models.experts import SLOTS, by_expert
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms
from jaxvllm.models.forms.scaled_rows import ScaledRows
from jaxvllm.models.params import Layout, Params, declare_layer
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.expert_slots import ExpertSlots
from jaxvllm.runtime.recipe import Recipe
from sharding.axis import ModelAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import MODEL
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture

pytestmark = pytest.mark.usefixtures("quick_programs")
# Its experts have biases, and there are layers of one kind only.
FIXTURE = Fixture.load("gpt_oss")
NUM_EXPERTS, NUM_REDUNDANT, SIZE = 6, 6, 4
LAYER = 2


def experts_of(params: Params, name: str) -> list[np.ndarray]:
    """The arrays [slots, ..] of the layer."""
    layers = params["layers"]
    held = layers[LAYER][name] if isinstance(layers, list) else jax.tree.map(lambda x: x[LAYER], layers[name])
    return list(map(np.asarray, jax.tree.leaves(held)))


@pytest.mark.parametrize(
    ("layout", "form", "shape"),
    [
        ("separate", None, MeshShape(1, SIZE)),
        ("stacked", ScaledRows(), MeshShape(1, SIZE)),
        ("stacked", None, MeshShape(1, SIZE, stages=2)),
    ],
    ids=str,
)
def test_slots_hold_their_experts(layout: Layout, form: Any, shape: MeshShape, tmp_path: Path) -> None:
    mesh = make_mesh(shape, jax.devices())
    spec = by_expert(model_spec(FIXTURE.config, FIXTURE.max_model_len), NUM_REDUNDANT)
    forms = Forms() if form is None else Forms(experts=form)
    loaded = checkpoint.load(
        FIXTURE.write_checkpoint(tmp_path), spec, dtype=jnp.float32, layout=layout, mesh=mesh, forms=forms
    )
    whole = Spread.on(spec, mesh).whole
    names = [name for name, decl in declare_layer(whole, LAYER).items() if decl.axes[0] == "experts"]
    assert len(names) == 3  # two matrices and a bias
    first = {name: experts_of(loaded, name) for name in names}
    [table] = experts_of(loaded, SLOTS)
    assert experts_in(table, NUM_EXPERTS + NUM_REDUNDANT).tolist() == [0, 1, 2, 3, 4, 5, *[NOTHING] * 6]
    programs = []

    def make(recipe: Recipe) -> Any:
        programs.append(recipe.compile())
        return programs[-1]

    slots, params = ExpertSlots(Spread.on(spec, mesh), loaded, mesh, make), loaded
    assert len(programs) == 1
    other = [jnp.array(x) for x in experts_of(params, "router")]
    for wanted in (
        [5, 4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 0, 3, 4, 0, 5, NOTHING, 0, 1, 2],
        [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0],
    ):
        params = slots.moved(params, LAYER, np.array(wanted, np.int32))
        for name in names:
            for before, now in zip(first[name], experts_of(params, name), strict=True):
                for slot, expert in enumerate(wanted):
                    if expert != NOTHING:
                        np.testing.assert_array_equal(now[slot], before[expert])
        [table] = experts_of(params, SLOTS)
        assert experts_in(table, len(wanted)).tolist() == wanted
        slots.read(params)
        assert slots.held[LAYER].tolist() == wanted
    assert all((x == y).all() for x, y in zip(other, experts_of(params, "router"), strict=True))


# Experts beside an FFN, and experts without a gate in a space of their own: each sums up in its own way.
@pytest.mark.parametrize("name", ["gemma4-experts", "nemotron_h"])
def test_logits_have_the_same_bits_wherever_experts_are(name: str, tmp_path: Path) -> None:
    fixture, mesh = Fixture.load(name), make_mesh(MeshShape(1, SIZE), jax.devices())
    spec = by_expert(model_spec(fixture.config, fixture.max_model_len), NUM_REDUNDANT)
    spread = Spread(spec, SIZE)
    params = checkpoint.load(fixture.write_checkpoint(tmp_path), spec, dtype=jnp.float32, layout="stacked", mesh=mesh)
    run = jax.jit(
        jax.shard_map(
            lambda params, tokens: dense_logits(params, spread.shard, tokens, ModelAxis(SIZE)),
            mesh=mesh,
            in_specs=(jax.tree.map(lambda x: x.sharding.spec, params), PartitionSpec()),
            out_specs=PartitionSpec(None, MODEL),
            check_vma=False,
        )
    )
    prompt, expected = fixture.prompts[-1], fixture.logits[-1]
    tokens = np.zeros(fixture.max_model_len, np.int32)
    tokens[: len(prompt)] = prompt
    slots, first = ExpertSlots(spread, params, mesh, Recipe.compile), None
    for wanted in ([*range(6), *[NOTHING] * 6], [5, 0, 3, 1, 2, 0, 4, 3, 0, NOTHING, 1, 2]):
        for layer in slots.ffns:
            params = slots.moved(params, layer, np.array(wanted, np.int32))
        logits = np.asarray(run(params, tokens))[: len(prompt), : spec.vocab_size]
        np.testing.assert_allclose(logits[-1], expected, atol=1e-4, rtol=0)
        first = logits if first is None else first
        np.testing.assert_array_equal(logits, first)


def test_no_array_is_copied() -> None:
    """Beside its arguments the program needs a few experts, and not all of a device's."""
    mesh = make_mesh(MeshShape(1, SIZE), jax.devices())
    config = FIXTURE.config | {"num_local_experts": 60}
    spec = by_expert(model_spec(config, FIXTURE.max_model_len), 4)
    spec = replace(spec, layers=spec.layers[:1])
    params = checkpoint.load(
        Path(), spec, dtype=jnp.float32, layout="separate", mesh=mesh, load_format="dummy", hf_config=config
    )
    programs = []

    def make(recipe: Recipe) -> Any:
        programs.append(recipe.compile())
        return programs[-1]

    slots = ExpertSlots(Spread.on(spec, mesh), params, mesh, make)
    [program] = programs
    held = [params["layers"][0][name] for name in slots._names(0)]
    of_device = sum(x.addressable_shards[0].data.nbytes for x in held)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 8 * of_device / 16
    assert memory.alias_size_in_bytes >= of_device
