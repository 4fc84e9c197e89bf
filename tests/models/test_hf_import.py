"""Tensors on devices become the arrays that a checkpoint of them is read as, number by number."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.forms.packed import Packed
from jaxvllm.models.forms.turned import Turned
from jaxvllm.models.hf_export import HfExport
from jaxvllm.models.hf_import import params_of
from jaxvllm.models.spread import Spread
from pallas_kernels.backend import REFERENCE
from pallas_kernels.cpu.host import host_chip
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.fixture import Fixture

FORMS = {
    "plain": lambda: PLAIN_FORMS,
    "packed": lambda: Forms(layers=(packed := Packed(host_chip(), "float32")), outside=packed, head=packed),
    "turned": lambda: Forms(layers=Turned(), outside=Turned(), head=Turned()),
}


@pytest.mark.parametrize(
    ("name", "layout", "mesh", "forms"),
    [
        ("qwen2", "separate", "1x1", "packed"),
        ("gemma3", "separate", "1x1", "turned"),
        # Columns of gate and up take turns, copies of KV heads, rows that fill the vocabulary up, and stacks of layers.
        ("gpt_oss", "stacked", "1x4", "plain"),
    ],
)
def test_each_number_gets_its_place(name: str, layout: Any, mesh: str, forms: str) -> None:
    fixture = Fixture.load(name)
    spec, devices = model_spec(fixture.config), make_mesh(MeshShape.parse(mesh), jax.devices())
    weights = fixture.weights()
    given: Any = dict(dtype=jnp.float32, layout=layout, mesh=devices, hf_config=fixture.config, forms=FORMS[forms]())
    read = checkpoint.load(Path(), spec, tensors=weights, **given)
    export = HfExport.of(Spread.on(spec, devices), find_family(fixture.config))
    tensors = {tensor: jnp.asarray(weights[tensor]) for tensor in export.shapes}
    made = jax.jit(lambda tensors: params_of(tensors, export, read))(tensors)
    assert jax.tree.structure(made) == jax.tree.structure(read)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_form_that_rounds_is_refused() -> None:
    fixture = Fixture.load("qwen2")
    spec = model_spec(fixture.config)
    forms = Forms.chosen("int8", REFERENCE, may_turn=False, by_tile=True)
    given: Any = dict(dtype=jnp.float32, layout="separate", hf_config=fixture.config, forms=forms)
    read = checkpoint.load(Path(), spec, tensors=fixture.weights(), **given)
    export = HfExport.of(Spread(spec), find_family(fixture.config))
    with pytest.raises(ValueError, match="keeps a rounded matrix"):
        params_of(jax.tree.map(jnp.asarray, fixture.weights()), export, read)
