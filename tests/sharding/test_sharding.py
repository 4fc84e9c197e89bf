"""Mesh shapes, and the table of axes."""

from dataclasses import dataclass
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import MeshShape
from sharding.placement import make_mesh, stage_meshes
from sharding.rules import partition_spec


def test_shapes_are_parsed() -> None:
    assert MeshShape.parse("2x4") == MeshShape(data=2, model=4)
    assert str(MeshShape.parse("1x8")) == "1x8"
    assert MeshShape(2, 4).num_devices == 8
    assert MeshShape.parse("4x1x2") == MeshShape(data=1, model=2, stages=4)
    assert str(MeshShape.parse("4x1x2")) == "4x1x2" and str(MeshShape.parse("1x1x2")) == "1x2"
    assert (MeshShape(2, 3, 4).num_devices, MeshShape(2, 3, 4).replica_devices) == (24, 12)


@pytest.mark.parametrize("text", ["", "8", "1x", "x", "1x2x3x4", "1x2x", "1X8", "-1x8", "1.0x2", "²x1", " 1x8"])
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="is not DxM: write replicas") as caught:
        MeshShape.parse(text)
    assert "\n" not in str(caught.value)


def test_empty_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh 0x8 has an empty axis"):
        MeshShape.parse("0x8")
    with pytest.raises(ValueError, match="mesh 0x1x8 has an empty axis"):
        MeshShape.parse("0x1x8")


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match="mesh 1x99 needs 99 devices"):
        make_mesh(MeshShape(1, 99), jax.devices())


@dataclass(frozen=True)
class Device:
    """As much of a device as `make_mesh` looks at."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def test_a_stage_has_the_devices_of_one_host() -> None:
    """Also where numbers alternate between hosts, as those of a TPU slice do."""
    devices: Any = [Device(id, process_index=id // 2 % 2) for id in range(8)]
    mesh = make_mesh(MeshShape(data=1, model=4, stages=2), devices)
    assert mesh.shape == {"data": 1, "stage": 2, "model": 4}
    assert [[device.id for device in stage] for stage in mesh.devices[0]] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [{device.process_index for device in stage.devices.flat} for stage in stage_meshes(mesh)] == [{0}, {1}]


def test_axes_become_mesh_axes() -> None:
    assert partition_spec(("layers", "kv_heads", None, "embed")) == PartitionSpec("stage", "model", None, None)


def test_collisions_and_unknown_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="two axes of .* over the mesh axis 'model'"):
        partition_spec(("heads", "vocab"))
    with pytest.raises(ValueError, match="unknown logical axis 'time'.*vocab, embed"):
        partition_spec(("time",))


def test_a_mesh_that_no_slice_has_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a page of coordinates\n")

    monkeypatch.setattr(jax, "make_mesh", refused)
    with pytest.raises(ValueError, match="mesh 1x3 is no part of a cpu slice: use sides that are powers of two$"):
        make_mesh(MeshShape(1, 3), jax.devices())
