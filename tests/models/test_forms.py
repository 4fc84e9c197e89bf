"""Forms: the same model whatever its matrices are kept as, and a form that this file adds from outside."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxvllm.config import Quantization
from jaxvllm.models import checkpoint, orbax_tree
from jaxvllm.models.declaration import ParamDecl, Storage
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import PLAIN_FORMS, QUANTIZATIONS, Form, Forms, Matrix, packed
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.cpu_kernel import CpuKernel
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.forms.form import Arrays
from jaxvllm.models.forms.packed import Packed
from jaxvllm.models.forms.plain import xla_product
from jaxvllm.models.forms.rounded_tokens import RoundedTokens
from jaxvllm.models.forms.scaled_rows import CpuInt8, ScaledRows
from jaxvllm.models.params import Layout, abstract_params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.planner.share import Share
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import CHIPS
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.packed_matmul import Panels
from pallas_kernels.quantized_matmul.code import E4M3, Code
from pallas_kernels.quantized_matmul.code import INT8 as INT8_CODE
from sharding.axis import ModelAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import MODEL
from tests.models.dense import dense_logits, exact_logits
from tests.models.fixture import Fixture

pytestmark = pytest.mark.usefixtures("quick_fusions")

TOKENS = list(range(3, 20))
DECL = ParamDecl((2, 24, 40), (None, None, None))
INT8 = Forms(layers=ScaledRows())
AS_STORED = CpuKernel(host_chip())
KERNELS = Forms(layers=CpuInt8(host_chip()), outside=AS_STORED, head=AS_STORED, table=AS_STORED)
# A gated FFN with grouped heads, and one with two matrices, biases and a tied embedding.
NAMES = ["llama", "gpt2"]


@dataclass(frozen=True)
class Halves(Form):
    """A form that is registered nowhere: two arrays, each with every second value of a row, in bfloat16."""

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        half = replace(matrix, shape=(*matrix.shape[:-1], matrix.shape[-1] // 2), dtype="bfloat16")
        return {"even": half, "odd": half}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        parts = matrix.astype(jnp.bfloat16)
        return {
            name: jax.device_put(parts[..., first::2], shardings[name]) for first, name in enumerate(("even", "odd"))
        }

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        even, odd = (arrays[name].astype(x.dtype) for name in ("even", "odd"))
        return xla_product(x[:, ::2], even, dtype, is_slice) + xla_product(x[:, 1::2], odd, dtype, is_slice)


@dataclass(frozen=True)
class Case:
    """A model with the values to which int8 rounds its matrices, by NumPy."""

    path: Path
    spec: ModelSpec
    params: dict[str, Any]  # as stored
    rounded: dict[str, Any]

    @cached_property
    def expected(self) -> np.ndarray:
        """The logits of the rounded values, which are not rounded again."""
        return np.asarray(exact_logits(self.rounded, self.spec, TOKENS))

    def load(self, layout: Layout, forms: Forms, size: int = 1, stages: int = 1) -> dict[str, Any]:
        mesh = make_mesh(MeshShape(1, size, stages), jax.devices())
        return checkpoint.load(self.path, self.spec, dtype=jnp.float32, layout=layout, mesh=mesh, forms=forms)


def by_hand(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `ScaledRows` says in words."""
    largest = np.abs(matrix).max(-1)
    scales = np.where(largest > 0, largest * np.float32(1 / 127), np.float32(1))
    return np.rint(matrix / scales[..., None]).astype(np.int8), scales


def is_of_form(decl: ParamDecl) -> bool:
    return decl.storage == "matrix"


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    fixture = Fixture.load(request.param)
    path = fixture.write_checkpoint(tmp_path_factory.mktemp(request.param))
    spec = model_spec(fixture.config, fixture.max_model_len)
    params = checkpoint.load(path, spec, dtype=jnp.float32, layout="separate")
    decls = spec.layers[0].declare()

    def rounded(name: str, array: jax.Array) -> jax.Array:
        if not is_of_form(decls[name]):
            return array
        values, scales = by_hand(np.asarray(array))
        return jnp.asarray(values * scales[..., None])

    layers = [{name: rounded(name, array) for name, array in layer.items()} for layer in params["layers"]]
    return Case(path, spec, params, params | {"layers": layers})


@pytest.mark.parametrize(
    ("layout", "forms"),
    [("separate", INT8), ("stacked", INT8), ("separate", KERNELS)],
    ids=["xla", "stacked", "kernels"],
)
def test_int8_is_what_numpy_makes_of_each_row(case: Case, layout: Layout, forms: Forms) -> None:
    params = case.load(layout, forms)
    names = {name for name, decl in case.spec.layers[0].declare().items() if is_of_form(decl)}
    for number, stored in enumerate(case.params["layers"]):
        of_layer = params["layers"][number] if layout == "separate" else params["layers"]
        assert {name for name, node in of_layer.items() if isinstance(node, Matrix)} == names
        for name in names:
            arrays = {key: np.asarray(a) for key, a in of_layer[name].arrays.items()}
            if layout == "stacked":
                arrays = {key: array[number] for key, array in arrays.items()}
            values, scales = by_hand(np.asarray(stored[name]))
            np.testing.assert_array_equal(arrays["values"], values)
            np.testing.assert_array_equal(arrays["scales"], scales)
    logits = jax.jit(lambda params: dense_logits(params, case.spec, TOKENS))(params)
    np.testing.assert_allclose(logits, case.expected, atol=2e-5, rtol=0)
    assert np.abs(np.asarray(logits - dense_logits(case.params, case.spec, TOKENS))).max() > 1e-3


@pytest.mark.parametrize("packs", ["numpy", "kernel"])
def test_packed_matrices_multiply_as_plain_ones_do(case: Case, packs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if packs == "kernel":
        monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    forms = Forms.chosen(None, Backend("cpu", host_chip()), may_turn=True)
    params = case.load("separate", forms)
    for name, node in params["layers"][0].items():
        if not is_of_form(case.spec.layers[0].declare()[name]):
            continue
        stored = np.asarray(case.params["layers"][0][name])
        rows = stored if stored.shape[:-2] == (2,) else stored.reshape(-1, stored.shape[-1])
        assert isinstance(node.form, Packed)
        np.testing.assert_array_equal(node.arrays["panels"], Panels.of(host_chip(), "float32").packed(rows))
    logits = jax.jit(lambda params: dense_logits(params, case.spec, TOKENS))(params)
    chex.assert_trees_all_close(logits, dense_logits(case.params, case.spec, TOKENS), atol=2e-5, rtol=0)
    abstract = abstract_params(case.spec, jnp.float32, "separate", make_mesh(MeshShape(1, 1), jax.devices()), forms)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, params)


def test_a_matrix_of_a_single_output_is_not_packed() -> None:
    form = Packed(host_chip(), "float32")
    assert form.of_matrix(ParamDecl((1, 40), (None, None))) == CpuKernel(host_chip())
    assert form.of_matrix(ParamDecl((40, 1), (None, None), dtype="bfloat16")) == Packed(
        host_chip(), "bfloat16", (40, 1)
    )
    assert isinstance(form.of_matrix(ParamDecl((3, 24, 40), (None,) * 3, storage="experts")), Packed)


@pytest.mark.parametrize(
    ("layout", "forms"),
    [("stacked", INT8), ("separate", Forms(layers=Halves())), ("stacked", Forms(pads_tables=True))],
    ids=["int8", "halves", "tables"],
)
def test_on_a_mesh_as_on_one_device(case: Case, layout: Layout, forms: Forms) -> None:
    size = 2
    params = case.load(layout, forms, size)
    run = jax.shard_map(
        lambda params: dense_logits(params, Spread(case.spec, size).shard, TOKENS, ModelAxis(size)),
        mesh=make_mesh(MeshShape(1, size), jax.devices()),
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, params),),
        out_specs=PartitionSpec(None, MODEL),
        check_vma=False,
    )
    alone = jax.jit(lambda params: dense_logits(params, case.spec, TOKENS))(case.load(layout, forms))
    chex.assert_trees_all_close(np.asarray(jax.jit(run)(params))[:, : case.spec.vocab_size], alone, atol=2e-5, rtol=0)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    abstract = abstract_params(case.spec, jnp.float32, layout, mesh, forms)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, params)
    assert jax.tree.map(lambda x: x.sharding, abstract) == jax.tree.map(lambda x: x.sharding, params)


def test_stages_have_the_same_arrays(case: Case) -> None:
    # Three layers in two stages with room for two each: the place of the fourth stays empty.
    staged, whole = (case.load("stacked", INT8, size=2, stages=stages)["layers"] for stages in (2, 1))
    num_layers = case.spec.num_layers
    own = jax.tree.map(lambda stack: np.asarray(stack)[:num_layers], staged)
    chex.assert_trees_all_equal(own, jax.tree.map(np.asarray, whole))
    assert not any(np.asarray(stack)[num_layers:].any() for stack in jax.tree.leaves(staged))


def test_an_orbax_tree_is_rounded_when_it_is_read(case: Case, tmp_path: Path) -> None:
    orbax_tree.save(tmp_path / "orbax", case.params)
    read = checkpoint.load(tmp_path, case.spec, dtype=jnp.float32, layout="separate", forms=INT8)
    chex.assert_trees_all_equal(read, case.load("separate", INT8))


def test_the_planner_counts_what_is_kept(case: Case) -> None:
    plain, int8 = (Share(Spread(case.spec), jnp.dtype("float32"), forms) for forms in (PLAIN_FORMS, INT8))
    kept = jax.tree.leaves(case.load("stacked", INT8))
    assert int8.weight_bytes == sum(array.size * array.dtype.itemsize for array in kept)
    assert int8.weight_bytes < plain.weight_bytes
    assert int8.flops(7, 3) == plain.flops(7, 3)


def test_rows_of_tables_are_filled_up_to_whole_tiles(case: Case) -> None:
    params = case.load("separate", Forms(pads_tables=True))
    width = case.spec.hidden_size
    assert width % 128
    names = {"embed"} | ({"positions"} if case.spec.positions else {"lm_head"})
    assert {name for name, node in params.items() if isinstance(node, Matrix)} == names
    for name in names:
        [rows] = params[name].arrays.values()
        assert rows.shape[1] % 128 == 0
        np.testing.assert_array_equal(rows[:, :width], case.params[name])
        assert not np.asarray(rows)[:, width:].any()
    logits = jax.jit(lambda params: dense_logits(params, case.spec, TOKENS))(params)
    chex.assert_trees_all_close(logits, dense_logits(case.params, case.spec, TOKENS), atol=2e-5, rtol=0)


def test_a_table_of_a_form_without_rows_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Halves keeps no rows that could be looked up"):
        Halves().look_up({}, jnp.arange(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_that_is_the_head_too_lies_in_panels_where_one_cpu_has_it(dtype: str) -> None:
    decl = ParamDecl((130, 33), ("vocab", "embed"), storage="tied_table")
    table = jnp.asarray(np.random.default_rng(4).normal(size=(130, 33)), dtype)
    form = Forms.chosen(None, Backend("cpu", host_chip()), may_turn=True, dtype=dtype).of("embed", decl, None)
    assert isinstance(form, Packed)
    arrays = form.keep(table, {})
    # Numbers beyond the table are those of its first and last row.
    rows = form.look_up(arrays, jnp.asarray([0, 129, 77, -1, 130]))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, table[jnp.asarray([0, 129, 77, 0, 129])])


@pytest.mark.parametrize("storage", ["matrix", "tied_table"])
def test_a_cpu_has_the_head_beside_rounded_layers_in_eight_bits(storage: Storage) -> None:
    decl = ParamDecl((130, 64), ("vocab", "embed"), storage=storage)
    name = "lm_head" if storage == "matrix" else "embed"
    random = np.random.default_rng(4)
    table, x = (random.normal(size=(count, 64)).astype(np.float32) for count in (130, 3))
    forms = Forms.chosen("int4", Backend("cpu", host_chip()), may_turn=True, by_tile=True)
    form = forms.of(name, decl, None)
    arrays = form.keep(
        jnp.asarray(table), {part: SingleDeviceSharding(jax.devices()[0]) for part in form.declare(decl)}
    )
    filled_up = 130 + -130 % host_chip().panel_columns
    assert sum(array.nbytes for array in arrays.values()) == filled_up * 64 * (1 + 2 / 32)
    groups = table.reshape(130, 2, 32)
    scales = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(ml_dtypes.bfloat16).astype(np.float32)
    rounded = (np.clip(np.rint(groups / scales), -128, 127) * scales).reshape(130, 64)
    if storage == "tied_table":
        np.testing.assert_array_equal(form.look_up(arrays, jnp.asarray([0, 77, 129])), rounded[[0, 77, 129]])
    logits = np.asarray(form.product(jnp.asarray(x), arrays, jnp.float32))
    # Tokens are rounded to eight bits, too.
    assert np.abs(logits - x @ rounded.T).max() < 0.01 * np.abs(logits).max()
    assert Forms.chosen("fp8", Backend("cpu", host_chip()), may_turn=True, by_tile=True).of(name, decl, None) != form


@pytest.mark.parametrize(
    ("quantization", "backend"),
    [("int8_w8a8", REFERENCE), ("fp8_w8a8", REFERENCE), ("int8_w8a8", Backend("cpu", host_chip()))],
    ids=["int8", "fp8", "int8-cpu"],
)
def test_tokens_are_rounded_as_the_matrix_is(quantization: str, backend: Backend) -> None:
    random = np.random.default_rng(3)
    matrix, x = random.normal(size=(2, 24, 40)).astype(np.float32), random.normal(size=(7, 40)).astype(np.float32)
    x[2] = 0
    form = Forms.chosen(quantization, backend, may_turn=False).layers.of_matrix(DECL)
    arrays = form.keep(
        jnp.asarray(matrix), {name: SingleDeviceSharding(jax.devices()[0]) for name in form.declare(DECL)}
    )
    multiply = jax.jit(partial(form.product, dtype=None))
    y = multiply(jnp.asarray(x), arrays)
    code = QUANTIZATIONS[quantization].code

    def by_code(values: np.ndarray) -> np.ndarray:
        sizes = np.abs(values).max(-1, keepdims=True) * np.float32(1 / code.largest)
        sizes[sizes == 0] = 1
        steps = values / sizes
        return (np.rint(steps) if code == Code("int8") else steps.astype(ml_dtypes.float8_e4m3fn)) * sizes

    expected = np.einsum("ti,gui->tgu", by_code(x).astype(np.float64), by_code(matrix).astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    assert np.abs(expected - np.einsum("ti,gui->tgu", x, by_code(matrix))).max() > 1e-2
    np.testing.assert_array_equal(y[3:4], multiply(jnp.asarray(x[3:4]), arrays), "a token alone")


@pytest.mark.parametrize(
    ("quantization", "backend"),
    [("int8", REFERENCE), ("int8", Backend("cpu", host_chip())), ("int4", Backend("cpu", host_chip()))],
    ids=["int8", "int8-cpu", "int4-cpu"],
)
def test_a_row_with_a_nan_is_nan_when_it_is_rounded(quantization: str, backend: Backend) -> None:
    decl = ParamDecl((64, 128), ("ffn", "embed"), storage="matrix")
    form = Forms.chosen(quantization, backend, may_turn=False).layers.of_matrix(decl)
    matrix = jnp.ones(decl.shape).at[5, 77].set(jnp.nan)
    arrays = form.keep(matrix, {name: SingleDeviceSharding(jax.devices()[0]) for name in form.declare(decl)})
    y = np.asarray(form.product(jnp.ones((1, 128)), arrays, None))
    np.testing.assert_allclose(y, np.where(np.arange(64) == 5, np.nan, 128)[None], rtol=0.01)


@pytest.mark.parametrize(
    ("chip", "code", "wanted"),
    [
        ("v6e", INT8_CODE, True),
        ("v6e", E4M3, False),
        ("v7x", E4M3, True),
        ("h200", INT8_CODE, True),
        ("h200", E4M3, False),
        ("l4", INT8_CODE, True),
    ],
    ids=str,
)
def test_a_checkpoint_for_rounded_tokens_has_them_where_the_chip_multiplies_them(
    chip: str, code: Code, wanted: bool
) -> None:
    forms = FewBitsForms(Backend.of_chip(CHIPS[chip]))
    way = StoredAs(code, None, "bfloat16", rounds_tokens=True)
    assert isinstance(forms.of(way, None), RoundedTokens) == wanted
    assert not isinstance(forms.of(replace(way, rounds_tokens=False), None), RoundedTokens)
    assert not isinstance(forms.of(way, None, of_experts=True), RoundedTokens), "their kernels read codes"


def test_options_name_the_forms_that_people_may_choose() -> None:
    assert get_args(Quantization) == tuple(QUANTIZATIONS)
