"""Training: the derivatives of the decoder, over batches of sequences, with remat, on one device and on meshes."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.forms.packed import Packed
from jaxvllm.models.forms.turned import Turned
from jaxvllm.models.params import Layout
from jaxvllm.models.trained_model import TrainedModel
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.cpu.host import host_chip
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.quick import quick_compilation, quick_emitters

# Sinks and experts; windows in a pattern, a soft cap and keys and values that layers share; latents, a shared expert.
CASES: tuple[tuple[str, Layout], ...] = (
    ("gpt_oss", "stacked"),
    ("gemma4", "stacked"),
    ("deepseek_v3", "separate"),
)
S = 24


def model_of(
    name: str,
    layout: Layout = "separate",
    mesh: str = "1x1",
    forms: Forms = PLAIN_FORMS,
    backend: Backend = REFERENCE,
    dtype: str = "float32",
) -> tuple[TrainedModel, Any]:
    fixture = Fixture.load(name)
    spec, devices = model_spec(fixture.config), make_mesh(MeshShape.parse(mesh), jax.devices())
    tensors = fixture.weights()
    given: Any = dict(dtype=dtype, layout=layout, mesh=devices, forms=forms, hf_config=fixture.config, tensors=tensors)
    params = checkpoint.load(Path(), spec, **given)
    return TrainedModel.of(params, spec, devices, backend), params


def tokens_of(model: TrainedModel, rows: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(model.spec.vocab_size, size=(rows, S), dtype=np.int32))


def of_logits(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of next tokens."""
    values = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.take_along_axis(values, tokens[:, 1:, None], axis=-1).mean()


def derivatives(model: TrainedModel, params: Any, tokens: jax.Array) -> tuple[float, Any]:
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), tokens.shape)

    def loss(params: Any) -> jax.Array:
        return of_logits(model.logits(params, tokens, positions, jnp.ones_like(tokens), True), tokens)

    with quick_compilation(), quick_emitters(model.spec):
        value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), grads


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_derivatives_are_those_of_the_decoder(name: str, layout: Layout) -> None:
    """Reverse mode against forward mode, over the decoder and the attention that transformers' logits prove."""
    model, params = model_of(name, layout)
    tokens = tokens_of(model)
    value, grads = derivatives(model, params, tokens)
    rng = np.random.default_rng(1)  # jax's own would compile a program for each shape
    along = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)

    def of_decoder(params: Any) -> jax.Array:
        return of_logits(jax.lax.map(partial(dense_logits, params, model.spec), tokens), tokens)

    with quick_compilation(), quick_emitters(model.spec):
        expected, slope = jax.jit(partial(jax.jvp, of_decoder))((params,), (along,))
    assert value == pytest.approx(float(expected), abs=1e-5)
    pairs = zip(*map(jax.tree.leaves, (grads, along)), strict=True)
    found = sum(float((np.asarray(one) * other).sum()) for one, other in pairs)
    assert found == pytest.approx(float(slope), rel=1e-3, abs=1e-4)


def assert_alike(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    """A mesh has more rows of the vocabulary, which nothing depends on."""
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert not one[len(other) :].any()
        one = one[: len(other)]
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, atol=rtol * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


def test_a_mesh_has_the_same_derivatives() -> None:
    model, params = model_of("qwen3")
    tokens = tokens_of(model, 4)
    value, grads = derivatives(model, params, tokens)
    sharded, held = model_of("qwen3", mesh="2x2")
    same, of_mesh = derivatives(sharded, held, tokens)
    assert same == pytest.approx(value, abs=1e-5)
    assert_alike(of_mesh, grads)
    for one, other in zip(jax.tree.leaves(of_mesh), jax.tree.leaves(held), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.fixture(scope="module")
def plain_llama() -> tuple[jax.Array, float, Any]:
    """Tokens, the loss and the derivatives of plain arrays."""
    model, params = model_of("llama")
    tokens = tokens_of(model)
    return tokens, *derivatives(model, params, tokens)


@pytest.mark.parametrize("kind", ["turned", "packed"])
def test_derivatives_have_the_order_of_a_form(kind: str, plain_llama: tuple[jax.Array, float, Any]) -> None:
    tokens, value, grads = plain_llama
    form: Any = Turned() if kind == "turned" else Packed(host_chip(), "float32")
    formed, held = model_of("llama", forms=Forms(layers=form, outside=form, head=form))
    same, of_forms = derivatives(formed, held, tokens)
    assert same == pytest.approx(value, abs=1e-5)

    def plain(node: Any) -> Any:
        return node.form.plain(node.arrays) if hasattr(node, "form") else node

    assert_alike(jax.tree.map(plain, of_forms, is_leaf=lambda node: hasattr(node, "form")), grads)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="a model with layers that keep a state cannot be trained yet"):
        model_of("mamba")
    with pytest.raises(NotImplementedError, match="which keep copies of KV heads"):
        model_of("llama", mesh="1x4")
    forms = Forms.chosen("int8", REFERENCE, may_turn=False, by_tile=True)
    with pytest.raises(ValueError, match="keeps a rounded matrix"):
        model_of("llama", forms=forms)
