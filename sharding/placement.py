"""From a mesh shape to devices, and from logical axes to where an array lives."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from sharding.mesh import MeshShape
from sharding.rules import DATA, MODEL, partition_spec

# Where an array with these logical axes goes.
Place = Callable[[tuple[str | None, ...]], Sharding]


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh over the first `shape.num_devices` of the devices; ValueError when there are fewer."""
    if len(devices) < shape.num_devices:
        raise ValueError(f"mesh {shape} needs {shape.num_devices} devices and there are {len(devices)}")
    grid = np.asarray(devices[: shape.num_devices]).reshape(shape.data, shape.model)
    return Mesh(grid, (DATA, MODEL))


def place(mesh: Mesh) -> Place:
    """The placement that splits every array by the table of `sharding.rules`."""
    return lambda axes: NamedSharding(mesh, partition_spec(axes))


def place_on(device: jax.Device) -> Place:
    """The placement that puts every array whole on one device."""
    return lambda axes: jax.sharding.SingleDeviceSharding(device)
