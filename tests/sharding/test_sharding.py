"""Mesh shapes, and the table of axes."""

import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import partition_spec


def test_shapes_are_parsed() -> None:
    assert MeshShape.parse("2x4") == MeshShape(data=2, model=4)
    assert str(MeshShape.parse("1x8")) == "1x8"
    assert MeshShape(2, 4).num_devices == 8


@pytest.mark.parametrize("text", ["", "8", "1x", "x", "1x2x3", "1X8", "-1x8", "1.0x2", "²x1", " 1x8"])
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="is not DxM: write replicas") as caught:
        MeshShape.parse(text)
    assert "\n" not in str(caught.value)


def test_empty_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh 0x8 has an empty axis"):
        MeshShape.parse("0x8")


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match="mesh 1x99 needs 99 devices"):
        make_mesh(MeshShape(1, 99), jax.devices())


def test_axes_become_mesh_axes() -> None:
    assert partition_spec(("layers", "kv_heads", None, "embed")) == PartitionSpec(None, "model", None, None)


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
