"""Compiles for chips that are not here, with jax devices that exist for the compiler only.

libtpu and the CUDA plugin compile without a device and without a driver. Their programs are those that would run: one
can read memory, collectives and kernels from them, and meets the same compiler errors. Nothing can be run.

The process must have been started with JAX_PLATFORMS=cpu, or jax would look for a real device first. A process compiles
for one kind of GPU only. A compiler's fatal error ends the process, so a program that must survive it compiles in a
subprocess.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels.chips import Chip, GpuChip, TpuChip
from pallas_kernels.extras import install_command

MAX_DEVICES = 16
# Without these, libtpu asks the cloud's metadata server which machine this is, and prints long complaints. Programs are
# compiled for the topology that we name, whatever the machine is called here.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    # Only one process may use a real TPU, but any number may compile.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The slices that one can rent, up to sixteen devices, in chips. A chip of v7x is two devices.
_TPU_SLICES = {
    "v5e": ("v5e:1x1", "v5e:1x2", "v5e:2x2", "v5e:2x4", "v5e:4x4"),
    "v5p": ("v5p:1x1x1", "v5p:1x2x1", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"),
    "v6e": ("v6e:1x1", "v6e:1x2", "v6e:2x2", "v6e:2x4", "v6e:4x4"),
    "v7x": ("tpu7x:1x1x1", "tpu7x:1x2x1", "tpu7x:2x2x1", "tpu7x:2x2x2"),
}

# The oldest software that this CUDA plugin runs with, which is what it was built with. XLA takes a missing version for
# version 0 and leaves out what needs a newer one: float8 matmuls by cuBLASLt (CUDA 12) and block-scaled ones by cuDNN.
CUDA_VERSION = "13.0.0"
CUDNN_VERSION = "9.12.0"
# The GPU that this process compiles for, once it is known. The CUDA plugin keeps the first one's architecture for all
# kernels of Mosaic GPU: after a B200, ptxas was given an H200's kernel for sm_100a and refused its instructions.
_gpu_of_process: list[GpuChip] = []


def compile_only_devices(chip: Chip, count: int, hosts: int = 1) -> list[jax.Device]:
    """Returns `count` devices, 1 to 16, of the smallest slice or machine of such chips that has them.

    With several `hosts`, which must divide the second side of the slice or the number of GPUs, each has equally many.

    Arrays described as on them (`jax.ShapeDtypeStruct` with a sharding) make `jit(f).lower(...).compile()` compile for
    the chip. Programs with Pallas kernels for GPUs must be lowered within `lowering_for`.

    Raises ValueError for another count, and RuntimeError when this process cannot compile for the chip, because it has
    no compiler or compiles for another GPU already.
    """
    if not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"{count} devices: between 1 and {MAX_DEVICES} can be compiled for")
    if jax.config.jax_platforms != "cpu":
        raise RuntimeError("compiling without a device needs JAX_PLATFORMS=cpu from the start of the process")
    compiler = "libtpu" if isinstance(chip, TpuChip) else "jax_plugins.xla_cuda13"
    if not _is_installed(compiler):
        raise RuntimeError(f"no compiler for {chip.name}, {compiler} is not installed: {install_command('aot')}")
    devices = _tpu_devices(chip, count, hosts) if isinstance(chip, TpuChip) else _gpu_devices(chip, count, hosts)
    assert len(devices) >= count and devices[0].device_kind == chip.device_kind, devices
    return devices[:count]


@contextmanager
def lowering_for(mesh: Mesh) -> Iterator[None]:
    """Makes jax lower programs for the devices of `mesh`, which exist for the compiler only.

    Pallas asks the mesh which device it lowers for, and Mosaic GPU asks the default device for its generation: it took
    all chips for Hopper otherwise, while ptxas made their programs for the generation that they are of.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(mesh.devices.flat[0]):
        yield


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def _tpu_devices(chip: TpuChip, count: int, hosts: int) -> list[jax.Device]:
    # libtpu reads these when it is loaded, which the first topology causes.
    os.environ.update(_LIBTPU_ENVIRONMENT)
    num_chips = -(-count // chip.devices_per_chip)
    for name in _TPU_SLICES[chip.name]:
        sides = [int(side) for side in name.split(":")[1].split("x")]
        if math.prod(sides) >= num_chips:
            # One host has a whole slice, or one layer of it in the third dimension.
            host = [sides[0], sides[1] // hosts, 1]
            return topologies.get_topology_desc(name, platform="tpu", chips_per_host_bounds=host).devices
    raise AssertionError(f"no slice of {chip.name} has {count} devices")


def _gpu_devices(chip: GpuChip, count: int, hosts: int) -> list[jax.Device]:
    # The topology is one slice with `count` devices, all GPUs of one machine or of several.
    size = f"1x{hosts}x{count // hosts}"
    if chip not in (_gpu_of_process or [chip]):
        raise RuntimeError(
            f"a process can compile for one kind of GPU, and this one compiles for {_gpu_of_process[0].name}: "
            f"compile for {chip.name} in a new process"
        )
    _gpu_of_process[:] = [chip]
    return topologies.get_topology_desc(
        size, platform="cuda", topology=size, target_config=_gpu_target_config(chip)
    ).devices


def _gpu_target_config(chip: GpuChip) -> str:
    """Returns XLA's description of the GPU, a GpuTargetConfigProto as text, for its compiler and cost model.

    XLA refuses an unknown field, but silently drops a field whose name it has retired, such as `dnn_version_info`.
    """
    major, minor = chip.compute_capability
    extension = "ACCELERATED_FEATURES" if chip.ptx_target.endswith("a") else "NONE"
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: {chip.threads_per_sm}
          core_count: {chip.num_sms}
          fpus_per_core: {chip.fp32_lanes_per_sm}
          clock_rate_ghz: {chip.clock_ghz}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          thread_dim_limit_x: 1024
          thread_dim_limit_y: 1024
          thread_dim_limit_z: 64
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {chip.shared_memory_per_block}
          shared_memory_per_core: {chip.shared_memory_per_sm}
          l2_cache_size: {chip.l2_bytes}
          memory_bandwidth: {int(chip.hbm_bandwidth)}
          device_memory_size: {chip.hbm_bytes}
          driver_version: "{CUDA_VERSION}"
          runtime_version: "{CUDA_VERSION}"
          compile_time_toolkit_version: "{CUDA_VERSION}"
          dnn_version: "{CUDNN_VERSION}"
        }}
        platform_name: "CUDA"
        device_description_str: "{chip.device_kind}"
    """
