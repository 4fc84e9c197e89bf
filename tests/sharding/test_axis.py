"""What devices tell each other: the methods of ModelAxis and StageAxis on virtual devices."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding.axis import ALONE, ModelAxis, ReplicaAxis, StageAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, replica_meshes
from sharding.rules import MODEL

pytestmark = pytest.mark.usefixtures("quick_programs")

SIZE = 4


def on_devices(run: Callable[..., jax.Array], *specs: PartitionSpec) -> Callable[..., jax.Array]:
    """`run(axis, ...)` on four devices; its output of device i is out[i]."""
    mesh = make_mesh(MeshShape(1, SIZE), jax.devices())

    def shard(*arguments: jax.Array) -> jax.Array:
        return run(ModelAxis(SIZE), *arguments)[None]

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(MODEL), check_vma=False))


EVERYWHERE, COLUMNS = PartitionSpec(), PartitionSpec(None, MODEL)


@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_rows_are_shared_out_whole_and_come_back_in_order(num_rows: int) -> None:
    x = np.arange(num_rows * 8, dtype=np.float32).reshape(num_rows, 8)
    own = np.asarray(on_devices(lambda axis, x: axis.exchange(x), COLUMNS)(x))
    same = np.asarray(on_devices(lambda axis, x: axis.own_rows(x), EVERYWHERE)(x))
    count = -(-num_rows // SIZE)
    assert own.shape == (SIZE, count, 8)
    np.testing.assert_array_equal(own, same)
    np.testing.assert_array_equal(own.reshape(-1, 8)[:num_rows], x)
    back = np.asarray(on_devices(lambda axis, x: axis.all_rows(axis.own_rows(x), num_rows), EVERYWHERE)(x))
    for device in range(SIZE):
        np.testing.assert_array_equal(back[device], x)


def test_sums_means_and_places() -> None:
    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    assert np.all(np.asarray(on_devices(lambda axis, x: axis.sum(x), COLUMNS)(x)) == [12, 16])
    assert np.all(np.asarray(on_devices(lambda axis, x: axis.mean(x), COLUMNS)(x)) == [3, 4])
    firsts = on_devices(lambda axis: jnp.asarray(axis.first(5)))()
    assert np.asarray(firsts).tolist() == [0, 5, 10, 15]
    stacked = np.asarray(on_devices(lambda axis, x: axis.stack(x), COLUMNS)(x))
    assert stacked.shape == (SIZE, SIZE, 1, 2) and np.all(stacked.reshape(SIZE, 8) == x)


def test_alone_nothing_happens() -> None:
    x = jnp.arange(6.0).reshape(3, 2)
    for same in (ALONE.sum(x), ALONE.mean(x), ALONE.exchange(x), ALONE.own_rows(x), ALONE.all_rows(x, 3)):
        assert same is x
    assert ALONE.first(7) == 0 and ALONE.stack(x).shape == (1, 3, 2)


def test_replicas_have_meshes_of_their_own() -> None:
    meshes = replica_meshes(make_mesh(MeshShape(2, 4), jax.devices()))
    assert [mesh.shape for mesh in meshes] == [{"data": 1, "stage": 1, "model": 4}] * 2
    assert len({device for mesh in meshes for device in mesh.devices.flat}) == 8


def test_replicas_gather_tokens_and_get_their_own_sums() -> None:
    mesh = make_mesh(MeshShape(2, 2), jax.devices())
    x = np.arange(2 * 3 * 2, dtype=np.float32).reshape(6, 2)  # three tokens of each replica

    def shard(x: jax.Array) -> tuple[jax.Array, ...]:
        axis = ReplicaAxis(2)
        every = axis.gather(x)
        return (
            every[None],
            axis.own_sum(every),
            axis.own(every),
            axis.sum(x),
            axis.max(x),
            jnp.asarray(axis.first(5))[None],
        )

    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    every, own_sum, own, total, largest, first = map(np.asarray, run(x))
    np.testing.assert_array_equal(every, [x, x])
    np.testing.assert_array_equal(own_sum, 2 * x)
    np.testing.assert_array_equal(own, x)
    np.testing.assert_array_equal(total, [*(x[:3] + x[3:])] * 2)
    np.testing.assert_array_equal(largest, [*x[3:]] * 2)
    assert first.tolist() == [0, 5]
    alone, axis = jnp.asarray(x), ReplicaAxis()
    assert all(run(alone) is alone for run in (axis.gather, axis.own_sum, axis.own, axis.sum, axis.max))


@pytest.mark.parametrize("columns", [6, 5])  # 5 do not divide over two devices
def test_stages_pass_on_what_their_devices_have(columns: int) -> None:
    mesh = make_mesh(MeshShape(data=1, model=2, stages=3), jax.devices())
    x = jnp.arange(3 * 4 * columns).reshape(3, 4, columns)

    def shard(x: jax.Array) -> jax.Array:
        return StageAxis(3).pass_on(x[0], ModelAxis(2))[None]

    spec = PartitionSpec("stage")
    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    np.testing.assert_array_equal(run(x), np.roll(x, 1, axis=0))
    sent = re.findall(r"s32\[4,(\d)\]\S* collective-permute", run.lower(x).compile().as_text() or "")
    assert sent == ["3" if columns == 6 else "5"]


@pytest.mark.parametrize("num_terms", [1, 3, 8, 100])
def test_a_sum_of_terms_does_not_depend_on_their_devices(num_terms: int) -> None:
    random = np.random.default_rng(num_terms)
    terms = random.normal(size=(6, num_terms, 16)).astype(np.float32)
    terms *= np.array([1e-45, 1e-30, 1e-3, 1, 1e6, 1e30], np.float32)[:, None, None]
    summed = on_devices(lambda axis, x: axis.sum_terms(x[0]), PartitionSpec(MODEL))

    def over_devices() -> np.ndarray:
        here = random.integers(SIZE, size=terms.shape[:2]) == np.arange(SIZE)[:, None, None]
        found = np.asarray(summed(np.where(here[..., None], terms, 0)))
        assert (found == found[0]).all()
        return np.asarray(found[0])

    found = np.asarray(jax.jit(ALONE.sum_terms)(terms))
    for _ in range(3):
        np.testing.assert_array_equal(over_devices().view(np.int32), found.view(np.int32))
    # Each term is rounded to a part of the largest one of its row, and the sum to a float.
    part = 2.0**-24 + 2.0 ** -(30 - (num_terms - 1).bit_length())
    tolerance = num_terms * np.maximum(np.abs(terms).max((1, 2)) * part, 2.0**-126)[:, None]
    assert (np.abs(found - terms.astype(np.float64).sum(1)) <= tolerance).all()


def test_a_term_that_is_no_number_is_seen_in_its_row_alone() -> None:
    terms = np.ones((SIZE, 3, 2, 1), np.float32)
    terms[1:] = 0
    terms[2, 1, 0], terms[3, 2, 1] = np.nan, np.inf
    found = np.asarray(on_devices(lambda axis, x: axis.sum_terms(x[0]), PartitionSpec(MODEL))(terms))
    assert (found[:, 0] == 2).all() and np.isnan(found[:, 1:]).all()
