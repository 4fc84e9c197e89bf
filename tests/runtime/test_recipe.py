"""Two recipes have one name only if they give the same program."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import PLAIN, Matrix
from jaxvllm.models.forms.scaled_rows import CpuInt8, ScaledRows
from jaxvllm.models.forms.turned import Turned
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.ops import biased, project
from jaxvllm.runtime import recipe
from jaxvllm.runtime.recipe import TRACED_PACKAGES, NoName, Recipe
from jaxvllm.runtime.sampler import SamplerOptions
from jaxvllm.runtime.step import forward
from jaxvllm.runtime.step_model import StepModel
from pallas_kernels.backend import REFERENCE
from pallas_kernels.cpu.host import host_chip
from tests.models.changed import changed
from tests.models.fixture import Fixture
from tests.pallas_kernels.cpu_chips import SAPPHIRE_RAPIDS
from tests.runtime.test_step_memory import SHAPE


def mesh(*devices: int) -> Mesh:
    return Mesh(np.array([jax.devices()[i] for i in devices]), ("model",))


def struct(*shape: int, dtype: Any = jnp.float32, on: Mesh | None = None, spec: Any = ()) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on or mesh(0), PartitionSpec(*spec)))


def add() -> Recipe:
    return Recipe(biased, (struct(4), struct(4)), mesh(0))


def step(**changes: Any) -> Recipe:
    """The recipe of a step, of which only the name is asked."""
    model = StepModel(model_spec(Fixture.load("llama").config, 64), SHAPE, REFERENCE)
    return replace(add(), run=partial(forward, model=replace(model, **changes)))


def test_another_process_gives_the_same_name() -> None:
    """Nothing in it depends on addresses, on the order of sets, or on the hashes of strings."""
    program = "from tests.runtime.test_recipe import add, step; print(add().name(), step().name())"
    root = Path(recipe.__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    assert said.stdout.split() == [add().name(), step().name()]


def test_whatever_differs_gives_another_name() -> None:
    spec = model_spec(Fixture.load("llama").config, 64)
    recipes = [
        add(),
        *(replace(add(), run=partial(biased, bias=bias)) for bias in (None, 1, 1.0, True, "1", np.float32(1))),
        *(replace(add(), run=partial(biased, bias=jax.ShapeDtypeStruct(s, jnp.float32))) for s in ((4,), (1, 4))),
        replace(add(), run=project),
        *(
            replace(add(), arguments=(argument, struct(4)))
            for argument in (
                struct(1),
                struct(4, dtype=jnp.bfloat16),
                (struct(4),),
                {"x": struct(4)},
                {"y": struct(4)},
                Matrix(PLAIN, {"x": struct(4)}),  # type: ignore[dict-item]
                Matrix(Turned(), {"x": struct(4)}),  # type: ignore[dict-item]
                Matrix(ScaledRows(), {"x": struct(4)}),  # type: ignore[dict-item]
                Matrix(CpuInt8(host_chip()), {"x": struct(4)}),  # type: ignore[dict-item]
                Matrix(CpuInt8(SAPPHIRE_RAPIDS), {"x": struct(4)}),  # type: ignore[dict-item]
                Matrix(CpuInt8(SAPPHIRE_RAPIDS.without("amx-tile")), {"x": struct(4)}),  # type: ignore[dict-item]
            )
        ),
        replace(add(), arguments=(struct(4, on=mesh(1)),) * 2, mesh=mesh(1)),
        replace(add(), arguments=(struct(4, on=mesh(0, 1)),) * 2, mesh=mesh(0, 1)),
        replace(add(), arguments=(struct(4, on=mesh(0, 1), spec=["model"]),) * 2, mesh=mesh(0, 1)),
        replace(add(), donates=(0,)),
        replace(add(), out_specs=PartitionSpec()),
        replace(add(), out_specs=PartitionSpec("model")),
        replace(add(), out_shardings=NamedSharding(mesh(0), PartitionSpec())),
        step(),
        step(sampling=SamplerOptions(max_logprobs=21)),
        step(shape=replace(SHAPE, page_size=SHAPE.page_size * 2)),
        step(spec=replace(spec, norm=RmsNorm(1e-3))),
        step(spec=changed(spec, ffn={"activation": "gelu"})),
    ]
    names = [one.name() for one in recipes]
    assert len(set(names)) == len(names)


def test_the_surroundings_are_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        lambda patch: patch.setattr(recipe, "sources_digest", lambda: "other sources"),
        lambda patch: patch.setattr(recipe, "_host_cpu", lambda: "another CPU"),
        lambda patch: patch.setattr("jaxlib.version.__version__", "0.0"),
        lambda patch: patch.setitem(recipe.COMPILER_OPTIONS["cpu"], "xla_backend_optimization_level", 0),
    ]
    names = {add().name()}
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            names.add(add().name())
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    names.add(add().name())
    jax.config.update("jax_default_matmul_precision", before)
    assert len(names) == len(changes) + 2


def _of_a_user(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias


@pytest.mark.parametrize(
    "run",
    [
        _of_a_user,
        lambda x, bias: x + bias,
        partial(biased, bias=_of_a_user),
        partial(forward, model=SamplerOptions(logits_processors=(_of_a_user,))),
        partial(biased, bias=object()),
    ],
)
def test_what_is_not_known_has_no_name(run: Callable[..., Any]) -> None:
    with pytest.raises(NoName, match="is not known here"):
        replace(add(), run=run).name()


def test_a_changed_source_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        recipe.sources_digest.cache_clear()
        return recipe.sources_digest()

    monkeypatch.setattr(recipe, "_ROOT", tmp_path)
    for package in TRACED_PACKAGES:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "x.py").write_text("x = 1")
    digests = [digest()]
    (tmp_path / "sharding" / "x.py").write_text("x = 2")
    digests.append(digest())
    (tmp_path / "pallas_kernels" / "tuned.json").write_text("{}")
    digests.append(digest())
    (tmp_path / "sharding" / "__pycache__").mkdir()
    (tmp_path / "sharding" / "__pycache__" / "x.pyc").write_text("")
    assert len(set(digests)) == 3 and digest() == digests[-1]
    (tmp_path / "jaxvllm/models/x.py").unlink()
    with pytest.raises(NoName, match="no sources of jaxvllm/models"):
        digest()
    monkeypatch.undo()
    digest()


def test_of_the_core_only_what_is_traced_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = recipe.traced_core(recipe._ROOT)
    assert core.keys() >= {"jaxvllm.core.step_plan", "jaxvllm.core.value_checks"}  # the second one through others
    assert not core.keys() & {"jaxvllm.core.scheduler", "jaxvllm.core.constrained_rows", "jaxvllm.core.routing"}

    def digest() -> str:
        recipe.sources_digest.cache_clear()
        recipe.traced_core.cache_clear()
        return recipe.sources_digest()

    monkeypatch.setattr(recipe, "_ROOT", tmp_path)
    for package in (*TRACED_PACKAGES, "jaxvllm/core"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "x.py").write_text("x = 1")
    for name in ("plan", "page", "scheduler"):
        (tmp_path / f"jaxvllm/core/{name}.py").write_text("x = 1")
    (tmp_path / "jaxvllm/runtime/x.py").write_text("from jaxvllm.core.plan import x\n")
    (tmp_path / "jaxvllm/core/plan.py").write_text("from jaxvllm.core.page import x\n")
    before = digest()
    (tmp_path / "jaxvllm/core/scheduler.py").write_text("x = 2")
    assert digest() == before
    (tmp_path / "jaxvllm/core/page.py").write_text("x = 2")
    assert digest() != before
    monkeypatch.undo()
    digest()
