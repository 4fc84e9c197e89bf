"""The one table from logical axes to mesh axes. The models name logical axes only."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

DATA = "data"
STAGE = "stage"
MODEL = "model"

# An axis that maps to None is whole on every device.
RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "vocab": MODEL,
    "embed": None,
    "heads": MODEL,  # query heads, grouped by their KV head
    "kv_heads": MODEL,
    "ffn": MODEL,
    "experts": (DATA, MODEL),  # over all replicas of the mesh: where each has experts of its own, it has its own mesh
    "vocab_of_replicas": (DATA, MODEL),  # of tables that each replica of the mesh has for itself
    "pages": DATA,
    "replicas": DATA,
    "layers": STAGE,
}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns how an array with these logical axes is split. A dimension with None is never split.

    Raises ValueError for an axis that the table lacks, and when two axes of one array claim the same mesh axis.
    """
    mesh_axes: list[str | tuple[str, ...] | None] = []
    claimed: set[str] = set()
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r} in {axes}: the table has {', '.join(RULES)}")
        mesh_axis = RULES[axis] if axis is not None else None
        for name in (mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis or ():
            if name in claimed:
                raise ValueError(f"two axes of {axes} are split over the mesh axis {name!r}: only one can be")
            claimed.add(name)
        mesh_axes.append(mesh_axis)
    return PartitionSpec(*mesh_axes)
