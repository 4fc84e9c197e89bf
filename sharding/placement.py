"""Makes meshes of devices from their shape, and places arrays on them by their logical axes."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sharding.mesh import MeshShape
from sharding.rules import DATA, MODEL, STAGE, partition_spec

# Returns the sharding of an array with these logical axes.
Place = Callable[[tuple[str | None, ...]], NamedSharding]

# An array that has a part for each replica of a mesh, which all devices of the replica have whole.
OF_REPLICAS = PartitionSpec(DATA)
# An array that all devices of a mesh have whole.
EVERYWHERE = PartitionSpec()
_AXES = (DATA, STAGE, MODEL)
# The axes are Auto and not Explicit: arrays outside the step's shard_map carry their sharding, so types need not.
_TYPES = (AxisType.Auto,) * len(_AXES)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """Makes the mesh of the first `shape.num_devices` devices, in the order that suits their interconnect.

    Each stage takes the devices of as few hosts as hold it, so that between hosts only stages send each other anything.
    Raises ValueError when there are fewer devices, or when they do not form such a mesh.
    """
    if len(devices) < shape.num_devices:
        way_out = "use a smaller mesh"
        if devices[0].platform == "cpu":
            way_out += f", or have more virtual devices: JAX_NUM_CPU_DEVICES={shape.num_devices} in the environment"
        raise ValueError(f"mesh {shape} needs {shape.num_devices} devices and there are {len(devices)}: {way_out}")
    chosen = list(devices[: shape.num_devices])
    if shape.stages > 1:
        chosen.sort(key=lambda device: device.process_index)
    size = shape.data * shape.model
    try:
        stages = [
            jax.make_mesh((shape.data, 1, shape.model), _AXES, _TYPES, devices=chosen[first : first + size])
            for first in range(0, len(chosen), size)
        ]
    except (AssertionError, NotImplementedError) as error:  # jax's own message is a page of device coordinates
        raise ValueError(
            f"mesh {shape} is no part of a {devices[0].device_kind} slice: use sides that are powers of two"
        ) from error
    return Mesh(np.concatenate([stage.devices for stage in stages], axis=1), _AXES, _TYPES)


def replica_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """Returns the mesh of each of the D replicas of a DxM or PxDxM mesh."""
    return tuple(Mesh(mesh.devices[i : i + 1], mesh.axis_names) for i in range(mesh.shape[DATA]))


def stage_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """Returns the mesh of each of the P stages of a PxDxM mesh. It has no other stage."""
    return tuple(Mesh(mesh.devices[:, i : i + 1], mesh.axis_names) for i in range(mesh.shape[STAGE]))


def spans_processes(mesh: Mesh) -> bool:
    """Returns whether several processes have devices of `mesh`."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def mesh_of(device: jax.Device) -> Mesh:
    """Returns the 1x1 mesh of one device."""
    return make_mesh(MeshShape(1, 1), [device])


def place(mesh: Mesh) -> Place:
    """Returns the placement that splits every array by the table of `sharding.rules`."""
    return lambda axes: NamedSharding(mesh, partition_spec(axes))


def of_replicas(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns an array that has a part of this shape for each replica of `mesh`, one after the other.

    On the mesh of a single replica every device has the whole array.
    """
    count, *rest = shape
    sharding = NamedSharding(mesh, OF_REPLICAS)
    return jax.ShapeDtypeStruct((mesh.shape[DATA] * count, *rest), dtype, sharding=sharding)
