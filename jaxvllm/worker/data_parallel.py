"""Opens the engines that a `DataParallelConfig` describes, and gives each its devices."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jaxvllm.config import EngineConfig
from jaxvllm.cores import num_cores
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from jaxvllm.worker.engine_pool import EnginePool, Places
from jaxvllm.worker.engine_process import LocalPlace
from jaxvllm.worker.node_messages import read_secret
from jaxvllm.worker.node_place import NodeDoor, NodePlaces
from jaxvllm.worker.queue_limits import QueueLimits
from jaxvllm.worker.ray_place import RayPlaces

# A CPU has no devices that could run out, and more replicas than this only slow each other down.
MOST_ON_A_CORE = 4

type DeviceKind = Literal["cpu", "gpu", "tpu"]
# What the kernel shows of each device, and the packages without which JAX does not see it.
GPU_FILES, GPU_PACKAGES = ("nvidia[0-9]*",), ("jax_cuda13_plugin", "jax_cuda12_plugin")
TPU_FILES, TPU_PACKAGES = ("accel*", "vfio/[0-9]*"), ("libtpu",)


def open_pool(
    engine: EngineConfig,
    parallel: DataParallelConfig,
    limits: QueueLimits | None = None,
    chat_template: str | None = None,
) -> EnginePool:
    """Returns the engines that both configs describe. Nothing starts before `launch`.

    Raises ValueError when the options contradict each other, or this host has too few devices, and NotImplementedError
    for what replicas that share experts cannot do.
    """
    size, shape = parallel.num_replicas(engine), engine.mesh_shape
    devices = shape.replica_devices
    kind = device_kind()
    backend = parallel.data_parallel_backend
    if backend == "auto":
        is_one = parallel.shares_experts(engine) or (kind == "tpu" and size > 1)
        backend = "in-process" if is_one else "mp"
    if engine.has_others or backend == "in-process":
        return EnginePool(parallel.in_one_engine(engine), 1, OneProcess(), limits, chat_template)
    each = replace(engine, mesh=str(replace(shape, data=1)))
    if backend == "ray":
        return EnginePool(each, size, RayPlaces(devices), limits, chat_template)
    num_local = size if parallel.data_parallel_size_local is None else parallel.data_parallel_size_local
    if num_local > size:
        raise ValueError(f"data_parallel_size_local is {num_local}, more than data_parallel_size, which is {size}")
    places: Places = OneProcess() if size == 1 and kind == "tpu" else OneHost(max(num_local, 1), devices, kind)
    if num_local < size:
        door = NodeDoor(parallel.data_parallel_address, parallel.data_parallel_rpc_port, read_secret())
        places = NodePlaces(places, num_local, devices, door)
    return EnginePool(each, size, places, limits, chat_template)


class OneProcess(Places):
    """All replicas are in one process, which has all devices of this host."""

    def place(self, rank: int) -> LocalPlace:
        """Implements `Places.place`."""
        if rank:
            raise ValueError("all replicas are in one process, so their number is fixed: start with another mesh")
        return LocalPlace()


class OneHost(Places):
    """Each engine has its own process on this host, with its own devices."""

    def __init__(self, size: int, model: int, kind: DeviceKind, environment: Mapping[str, str] = os.environ):
        """Begins with `size` engines of `model` devices each."""
        self._size = size
        self._model = model
        self._gpus = visible_gpus(environment) if kind == "gpu" else None
        self._threads = environment.get("NPROC")

    def place(self, rank: int) -> LocalPlace:
        """Implements `Places.place`."""
        if self._gpus is None:
            most = max(self._size, MOST_ON_A_CORE * num_cores())
            if rank >= most:
                raise ValueError(
                    f"this host has {num_cores()} cores, which is enough for {most} engines: ask for fewer"
                )
            # XLA makes as many threads as there are cores in each process, which would get in each other's way.
            threads = self._threads or str(max(self._model, num_cores() // self._size))
            return LocalPlace({"NPROC": threads})
        own = self._gpus[rank * self._model : (rank + 1) * self._model]
        if len(own) < self._model:
            raise ValueError(
                f"engine {rank} needs {self._model} GPUs, and this host has {len(self._gpus)} for all engines: lower "
                "data_parallel_size"
            )
        return LocalPlace({"CUDA_VISIBLE_DEVICES": ",".join(own)})


def device_kind(environment: Mapping[str, str] = os.environ) -> DeviceKind:
    """Returns what JAX would compute on, without importing it."""
    wanted = [name for name in environment.get("JAX_PLATFORMS", "").split(",") if name]
    if wanted and wanted[0] in ("cpu", "tpu"):
        return "tpu" if wanted[0] == "tpu" else "cpu"
    if wanted or (visible_gpus(environment) and _has_one_of(GPU_PACKAGES)):
        return "gpu"
    return "tpu" if _files(TPU_FILES) and _has_one_of(TPU_PACKAGES) else "cpu"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name not in ("", "-1")]
    return [str(index) for index, _ in enumerate(_files(GPU_FILES))]


def _files(patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in Path("/dev").glob(pattern)]


def _has_one_of(packages: Iterable[str]) -> bool:
    return any(find_spec(name) for name in packages)
