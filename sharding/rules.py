"""The one table from logical axes, which the models name, to mesh axes, which they never do."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

DATA = "data"
MODEL = "model"

# An axis that maps to None is whole on every device.
RULES: Mapping[str, str | None] = {
    "vocab": MODEL,
    "embed": None,
    "heads": MODEL,  # query heads, grouped by their KV head
    "kv_heads": MODEL,
    "ffn": MODEL,
    "layers": None,
}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """How an array with these logical axes is split; None names an axis that never is.

    ValueError for an axis that the table lacks, and when two axes of one array claim the same mesh axis.
    """
    mesh_axes: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r} in {axes}: the table has {', '.join(RULES)}")
        mesh_axis = RULES[axis] if axis is not None else None
        if mesh_axis is not None and mesh_axis in mesh_axes:
            raise ValueError(f"two axes of {axes} are split over the mesh axis {mesh_axis!r}: only one can be")
        mesh_axes.append(mesh_axis)
    return PartitionSpec(*mesh_axes)
