"""`DataParallelConfig`: how many replicas of a model there are, and where their processes run."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxvllm.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """The options that say how replicas of the model are distributed. The names are vLLM's."""

    data_parallel_size: int | None = None  # replicas of the model; None: the D of --mesh DxM, which means the same
    # mp: each replica is a process of this host; ray: an actor of a Ray cluster; in-process: all are in one process, as
    # with auto on a TPU, whose chips belong to one process, or where the mesh spans hosts.
    data_parallel_backend: Literal["auto", "mp", "ray", "in-process"] = "auto"  # where replicas run; auto: mp mostly
    data_parallel_size_local: int | None = None  # replicas on this host; None: all of data_parallel_size
    data_parallel_start_rank: int = 0  # the number of the first replica on this headless host
    data_parallel_address: str = "127.0.0.1"  # address of the host that serves, where headless hosts reach it
    data_parallel_rpc_port: int = 29550  # its port for headless hosts; each engine has another port, which is any
    headless: bool = False  # serve nothing: run data_parallel_size_local replicas for the server of another host

    def __post_init__(self) -> None:
        for name in ("data_parallel_size_local", "data_parallel_start_rank"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be an integer of 0 or more, not {value!r}")
        if not 0 < self.data_parallel_rpc_port < 65536:
            raise ValueError(f"data_parallel_rpc_port must be from 1 to 65535, not {self.data_parallel_rpc_port!r}")
        if self.headless and not self.data_parallel_size_local:
            raise ValueError("a headless host needs data_parallel_size_local, the number of replicas that it runs")
        if self.data_parallel_start_rank and not self.headless:
            raise ValueError("data_parallel_start_rank is for headless hosts: the replicas of a server begin with 0")
        size = self.data_parallel_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"data_parallel_size must be a positive integer, not {size!r}")
        backends = get_args(type(self).__annotations__["data_parallel_backend"])
        if self.data_parallel_backend not in backends:
            backend = self.data_parallel_backend
            raise ValueError(f"data_parallel_backend must be one of {', '.join(backends)}, not {backend!r}")

    def num_replicas(self, engine: EngineConfig) -> int:
        """Returns the number of replicas. Raises ValueError when the engine's mesh says another number."""
        size, data = self.data_parallel_size, engine.mesh_shape.data
        if size is None or size == data:
            return data
        if data > 1:
            raise ValueError(
                f"data_parallel_size is {size}, and mesh {engine.mesh} has {data} replicas: give one of them"
            )
        return size

    def in_one_engine(self, engine: EngineConfig) -> EngineConfig:
        """Returns the config of one engine that has all replicas.

        Raises as `num_replicas` does, and where the options want replicas apart. Every process of the engine asks here
        before it joins the others, so that all of them refuse at once.
        """
        if self.data_parallel_backend not in ("auto", "in-process"):
            backend = self.data_parallel_backend
            raise ValueError(f"data_parallel_backend {backend} is for replicas of one process each: give in-process")
        size, local = self.num_replicas(engine), self.data_parallel_size_local
        if local is not None and local < size and self.shares_experts(engine):
            raise NotImplementedError(
                "replicas on several hosts share experts in one engine: leave data_parallel_size_local out and start "
                "the same command on each host with coordinator, num_processes and process_id, or give "
                "data_parallel_backend mp and no coordinator, with which each replica has all experts"
            )
        return replace(engine, mesh=str(replace(engine.mesh_shape, data=size)))

    def shares_experts(self, engine: EngineConfig) -> bool:
        """Returns whether replicas share experts, for which they are in one engine. Raises as `num_replicas` does."""
        is_one = self.data_parallel_backend in ("auto", "in-process")
        return is_one and engine.enable_expert_parallel and self.num_replicas(engine) > 1
