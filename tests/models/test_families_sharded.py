"""Every kind of layer computes on a mesh what transformers computes on one device, whatever divides or does not."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxvllm.models import checkpoint
from jaxvllm.models.experts import by_expert
from jaxvllm.models.families import model_spec
from jaxvllm.models.params import Layout
from jaxvllm.models.spread import Spread
from sharding.axis import ModelAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import MODEL
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.models.spec_parts import ON_FOUR_DEVICES
from tests.quick import quick_emitters

# A model whose heads are normed together, one with windows and two ropes, one whose checkpoint fuses q, k and v.
FEW = ("gemma3", "olmo2", "phi3")


def check(name: str, size: int, layout: Layout, directory: Path, *, is_by_expert: bool = False) -> None:
    check_fixture(Fixture.load(name), size, layout, directory, is_by_expert=is_by_expert)


def check_fixture(fixture: Fixture, size: int, layout: Layout, directory: Path, *, is_by_expert: bool = False) -> None:
    spec = model_spec(fixture.config, fixture.max_model_len)
    spec = by_expert(spec) if is_by_expert else spec
    spread, mesh = Spread(spec, size), make_mesh(MeshShape(1, size), jax.devices())
    params = checkpoint.load(fixture.write_checkpoint(directory), spec, dtype=jnp.float32, layout=layout, mesh=mesh)
    run = jax.shard_map(
        lambda params, tokens: dense_logits(params, spread.shard, tokens, ModelAxis(size)),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, params), PartitionSpec()),
        out_specs=PartitionSpec(None, MODEL),
        check_vma=False,
    )
    run = jax.jit(run)
    with quick_emitters(spec):
        fixture.check(lambda tokens: run(params, tokens), spec.vocab_size)


@pytest.mark.parametrize("name", FEW)
def test_separate_over_two_devices(name: str, tmp_path: Path) -> None:
    check(name, 2, "separate", tmp_path)


@pytest.mark.parametrize("name", ON_FOUR_DEVICES)
def test_stacked_over_four_devices(name: str, tmp_path: Path) -> None:
    # On one device each layer has its own arrays: test_families.
    check(name, 4, "stacked", tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen2"])
def test_over_more_devices_than_heads(name: str, tmp_path: Path) -> None:
    # Four query heads over two KV heads: ten over ten here, six of them zeros.
    check(name, 5, "stacked", tmp_path)


def test_experts_that_return_their_input_are_on_no_device(tmp_path: Path) -> None:
    check("longcat_flash", 4, "stacked", tmp_path, is_by_expert=True)


def test_heads_normed_together_are_not_filled_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this model norms all of them together: use a mesh of 1x1, 1x2, 1x4, or"):
        check("olmo2", 5, "stacked", tmp_path)
