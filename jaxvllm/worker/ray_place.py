"""`RayPlaces`: the engines of a pool are actors of a Ray cluster, each with its own devices."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import zmq.asyncio

from jaxvllm.config import EngineConfig
from jaxvllm.worker import wire
from jaxvllm.worker.engine_link import Address, listen, lost
from jaxvllm.worker.engine_pool import Places
from jaxvllm.worker.engine_process import EngineProcess, Place
from jaxvllm.worker.queue_limits import QueueLimits
from pallas_kernels.extras import install_command

logger = logging.getLogger(__name__)

# A cluster that grows by itself needs minutes to add a host.
ROOM_SECONDS = 300.0
# Variables of this process that an engine needs on another host. Ray itself says which devices an actor has.
PASSED_ON = ("JAX_", "XLA_", "HF_", "JAXVLLM_KV_")


class RayPlaces(Places):
    """Engines are placed wherever the cluster has devices for them."""

    def __init__(self, model: int):
        """Gives each engine `model` devices, which are on one host."""
        import_ray()  # an error belongs before the start
        self._place = RayPlace(model)

    def place(self, rank: int) -> Place:
        """Implements `Places.place`."""
        return self._place


class RayPlace:
    """Runs an engine as an actor in a placement group of its own. Implements `Place`.

    The group is made anew for each start, so an engine whose host is gone comes back on another one.
    """

    def __init__(self, model: int):
        self._model = model
        self._joining = asyncio.Lock()

    async def start(self, config: EngineConfig, limits: QueueLimits) -> EngineProcess:
        """Implements `Place.start`. Waits until the cluster has room, and raises OSError after `ROOM_SECONDS`."""
        ray = import_ray()
        async with self._joining:  # or several engines would start several clusters
            with own_signals():
                await asyncio.to_thread(join_cluster)
        bundle = bundle_of(ray.cluster_resources(), self._model)
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        try:
            if not await asyncio.to_thread(group.wait, 2):
                logger.info("the Ray cluster has no room for an engine, which needs %s: waiting", bundle)
                if not await asyncio.to_thread(group.wait, ROOM_SECONDS):
                    raise OSError(f"the Ray cluster has no room for an engine, which needs {bundle}: add hosts to it")
            actor = ray.remote(EngineActor).options(**_options(ray, group, bundle)).remote()
            try:
                host, pid = await actor.where.remote()
            except ray.exceptions.RayError as error:
                raise OSError(f"the Ray actor of an engine ended at its start: {_first_line(error)}") from error
        except BaseException:
            ray.util.remove_placement_group(group)
            raise
        socket, address = listen(ray.util.get_node_ip_address())
        environment = environment_of(os.environ, bundle)
        run = actor.run.remote(address.url, address.key, environment)
        life = Actor(ray, actor, group, run, socket, host, pid)
        engine = EngineProcess(life, socket)
        engine.send(wire.Start(config, limits))
        return engine


class EngineActor:
    """The class of the actors. An actor is a process of its own, which has not imported JAX before `run`."""

    def where(self) -> tuple[str, int]:
        """Returns the address of the actor's host, and the id of its process."""
        return str(import_ray().util.get_node_ip_address()), os.getpid()

    def run(self, url: str, key: bytes, environment: dict[str, str]) -> None:
        """Works for the client at this address until it says stop."""
        os.environ.update(environment)
        form = "%(levelname)s %(asctime)s engine: %(message)s"
        logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S")
        logging.getLogger("jaxvllm").setLevel(logging.INFO)
        from jaxvllm.worker.command_loop import serve

        serve(Address(url, key))


class Actor:
    """A running `EngineActor`. Implements `Life`."""

    def __init__(self, ray: Any, actor: Any, group: Any, run: Any, socket: zmq.asyncio.Socket, host: str, pid: int):
        self.pid = pid
        self.has_ended_itself = False
        self.is_out_of_reach = False
        self._ray = ray
        self._actor = actor
        self._group = group
        self._run = run
        self._socket = socket
        self._host = host
        self._end = "is running"

    async def wait(self) -> object:
        """Implements `Life.wait`: it ends, is killed, or its host cannot be reached any more."""
        disconnected = asyncio.ensure_future(lost(self._socket))
        ended = asyncio.ensure_future(self._watch())
        await asyncio.wait((disconnected, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():  # Ray may know soon why
            await asyncio.wait((ended,), timeout=1)
        if not ended.done():
            self._end = "is out of reach"
            self.is_out_of_reach = True
        for task in (disconnected, ended):
            task.cancel()
        self.kill()
        self._ray.util.remove_placement_group(self._group)
        return None

    async def _watch(self) -> None:
        try:
            await self._run
        except self._ray.exceptions.RayError as error:
            self._end = f"ended: {_first_line(error)}"
        else:
            self.has_ended_itself, self._end = True, "ended"

    def kill(self) -> None:
        """Implements `Life.kill`."""
        with suppress(Exception):  # it is dead already, or Ray is
            self._ray.kill(self._actor)

    def end_text(self) -> str:
        """Implements `Life.end_text`."""
        return f"{self.pid} on {self._host} {self._end}"


def import_ray() -> Any:
    """Returns the module `ray`. Raises ImportError that says how to install it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about the user is sent anywhere
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ImportError(f"replicas on a Ray cluster need Ray: {install_command('ray')}") from error
    return ray


@contextmanager
def own_signals() -> Iterator[None]:
    """Keeps this process's way to handle SIGTERM, which Ray replaces when it starts by one that aborts the process."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
            signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def join_cluster() -> None:
    """Joins the cluster of $RAY_ADDRESS, or the one that runs on this host, or starts one of this host alone."""
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError:
        logger.info("no Ray cluster is found, so one of this host alone is started: `ray start` makes larger ones")
        ray.init(include_dashboard=False)


def bundle_of(resources: Mapping[str, float], model: int) -> dict[str, float]:
    """Returns what a cluster with these resources must reserve for an engine of `model` devices."""
    wanted = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if wanted != "cpu":
        for name in ("GPU", "TPU"):
            if resources.get(name):
                return {name: model, "CPU": 1}
    return {"CPU": model}


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of an actor that has what `bundle` reserves."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus"}
    options: dict[str, Any] = {named[name]: count for name, count in bundle.items() if name in named}
    others = {name: count for name, count in bundle.items() if name not in named}
    return options | ({"resources": others} if others else {})


def environment_of(environment: Mapping[str, str], bundle: Mapping[str, float]) -> dict[str, str]:
    """Returns the variables of an engine with this bundle, beside those of its host."""
    passed = {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}
    return passed | ({} if len(bundle) > 1 else {"JAX_PLATFORMS": "cpu"})


def _options(ray: Any, group: Any, bundle: Mapping[str, float]) -> dict[str, Any]:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0)
    return actor_options(bundle) | {"scheduling_strategy": strategy, "max_restarts": 0}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
