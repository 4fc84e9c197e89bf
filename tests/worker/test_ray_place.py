"""Engines on a real Ray cluster of several nodes, all on this machine."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from jaxvllm.config import EngineConfig
from jaxvllm.worker.engine_client import EngineState
from jaxvllm.worker.engine_pool import EnginePool
from jaxvllm.worker.ray_place import RayPlaces, bundle_of, environment_of
from tests.router.test_kills import ENGINE, LISTENING, is_ready
from tests.waiting import PATIENCE, until, wait_until
from tests.worker.test_engine_pool import OPTIONS, all_ready, all_streams, pages_owned

# JAX, about processes that Ray starts at once after the fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for engines, and two nodes with room for one each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_engines_on_a_cluster_die_and_come_back(cluster: Any) -> None:
    import ray

    pool = EnginePool(EngineConfig.from_options(**OPTIONS), 2, RayPlaces(1))

    async def killed(number: int) -> list[Any]:
        victim = pool.engines[number]
        assert victim.pid is not None
        told = await all_streams(pool, victim)
        await asyncio.wait_for(victim.ready(), PATIENCE)
        assert victim.num_starts == 2
        return told

    async def launch() -> None:
        pool.launch()

    with start_blocking_portal() as portal, ExitStack() as undo:
        portal.call(launch)
        undo.callback(portal.call, pool.close)
        portal.call(all_ready, pool)
        expected = portal.call(all_streams, pool)
        assert len({engine.pid for engine in pool.engines}) == 2

        # kill -9 of a worker: its streams go on in the other, and it comes back.
        assert portal.call(killed, 1) == expected
        portal.call(all_ready, pool)
        assert portal.call(pages_owned, pool) == 0

        # A node goes for good: its engine waits for room, and comes back where there is some.
        streams = portal.start_task_soon(all_streams, pool)
        portal.call(until, lambda: pool.num_requests > 40)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert streams.result() == expected
        assert sum(engine.state is EngineState.READY for engine in pool.engines) == 1
        cluster.add_node(num_cpus=2)  # each node starts Ray's own processes, seconds of the CPU
        portal.call(all_ready, pool)

        # One more, and one less. The engine that came back answers, too.
        for size in (3, 2):
            streams = portal.start_task_soon(all_streams, pool)
            portal.call(pool.scale, size, PATIENCE)
            assert streams.result() == expected
        assert portal.call(pages_owned, pool) == 0
        undo.close()
        wait_until(lambda: {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"})


@pytest.mark.slow
def test_a_server_on_a_cluster_ends_when_it_is_asked_to(cluster: Any, tmp_path: Path) -> None:
    """Ray has its own idea of SIGTERM: it aborts the process."""
    command = [sys.executable, "-m", "jaxvllm.serve", *ENGINE, "--port", "0", "--data-parallel-backend", "ray"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        environment = os.environ | {"RAY_ADDRESS": cluster.address}
        with subprocess.Popen(command, stderr=file, stdout=file, env=environment) as server:
            try:
                found = wait_until(lambda: LISTENING.search(log.read_text()), log.read_text)
                wait_until(lambda: is_ready(f"http://127.0.0.1:{found[1]}"), log.read_text)
                server.terminate()
                assert server.wait(PATIENCE) == 0, log.read_text()
            finally:
                server.kill()


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"need Ray: .*pip install .*'ray\[serve\]"):
        RayPlaces(1)


def test_what_an_engine_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    assert bundle_of({"CPU": 96, "GPU": 8}, 2) == {"GPU": 2, "CPU": 1}
    assert bundle_of({"CPU": 96, "TPU": 4}, 4) == {"TPU": 4, "CPU": 1}
    assert bundle_of({"CPU": 96}, 2) == {"CPU": 2}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert bundle_of({"CPU": 96, "GPU": 8}, 1) == {"CPU": 1}


def test_what_an_engine_is_told() -> None:
    environment = {"JAX_PLATFORMS": "cuda", "JAXVLLM_API_KEY": "secret", "HF_HOME": "/models", "PATH": "/bin"}
    assert environment_of(environment, {"GPU": 1, "CPU": 1}) == {"JAX_PLATFORMS": "cuda", "HF_HOME": "/models"}
    assert environment_of(environment, {"CPU": 1}) == {"JAX_PLATFORMS": "cpu", "HF_HOME": "/models"}
