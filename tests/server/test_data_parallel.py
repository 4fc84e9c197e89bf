"""A server with several replicas, each in its own process, over HTTP."""

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.serve import serve
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from tests.processes import stopped
from tests.router.test_kills import ENGINE, NUM_STREAMS, all_streams, is_ready, running
from tests.waiting import PATIENCE, PAUSE, wait_until


def test_replicas_that_share_experts_do_not_change_their_number():
    engine = EngineConfig(mesh="2x1", enable_expert_parallel=True)
    with pytest.raises(ValueError, match="enable_elastic_ep changes the number of replicas, and replicas that share"):
        asyncio.run(serve(engine, ServerConfig(enable_elastic_ep=True), DataParallelConfig()))


@pytest.mark.slow
def test_an_engine_is_killed_and_others_come_and_go_and_no_stream_ends(tmp_path: Path) -> None:
    with running(tmp_path / "log", "serve", *ENGINE, "--data-parallel-size", "2", "--enable-elastic-ep") as server:
        wait_until(lambda: is_ready(server.url), lambda: "the server is not ready")

        def metric(name: str) -> dict[str, float]:
            """The values of a metric by engine."""
            text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
            found = re.findall(rf'^jaxvllm:{name}{{engine="(\d+)",\S* (\S+)$', text, re.MULTILINE)
            return {engine: float(value) for engine, value in found}

        wait_until(lambda: metric("engine_starts_total") == {"0": 1, "1": 1})
        expected = [one.text for one in asyncio.run(all_streams(server.url))]
        assert all(expected)

        told = asyncio.run(all_streams(server.url, server.engine_pids()[1]))
        assert [(one.text, one.is_whole) for one in told] == [(text, True) for text in expected]
        assert is_ready(server.url), "one engine is enough"
        wait_until(lambda: sum(metric("engine_starts_total").values()) == 3)

        async def scaled(size: int) -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
                body = {"new_data_parallel_size": size, "drain_timeout": 600}
                leaving = server.engine_pids()[size:]
                # Engines that leave stand still, with streams that they have not finished, until it was asked twice.
                with ExitStack() as still:
                    for pid in leaving:
                        still.enter_context(stopped(pid))
                    streams = asyncio.create_task(all_streams(server.url))
                    if leaving:
                        while (await client.get("/load")).json()["server_load"] < NUM_STREAMS // 5:
                            await asyncio.sleep(PAUSE)
                    scaling = asyncio.create_task(client.post("/scale_elastic_ep", json=body))
                    while not (await client.get("/is_scaling_elastic_ep")).json()["is_scaling_elastic_ep"]:
                        await asyncio.sleep(PAUSE)
                    assert (await client.post("/scale_elastic_ep", json=body)).status_code == 409
                assert (await scaling).json() == {"message": f"Scaled to {size} data parallel engines"}
                assert [(one.text, one.is_whole) for one in await streams] == [(text, True) for text in expected]
                assert len(server.engine_pids()) == size
                assert not (await client.post("/is_scaling_elastic_ep")).json()["is_scaling_elastic_ep"]

        asyncio.run(scaled(3))
        starts = metric("engine_starts_total")
        assert starts.keys() == {"0", "1", "2"}
        refused = httpx.post(f"{server.url}/scale_elastic_ep", json={"new_data_parallel_size": 1000}, timeout=PATIENCE)
        assert refused.status_code == 400
        assert metric("engine_starts_total") == starts, "engines that never came have no metrics"
        asyncio.run(scaled(1))
        assert metric("engine_starts_total").keys() == {"0"}
        wait_until(lambda: set(metric("kv_cache_usage_perc").values()) == {0}, lambda: metric("kv_cache_usage_perc"))


def test_a_server_with_one_engine_does_not_scale(server) -> None:
    config, headers = ServerConfig(enable_elastic_ep=True), {"origin": "http://page.example"}

    def asked(size: int, **options: Any) -> httpx.Response:
        return server.ask(config, "/scale_elastic_ep", new_data_parallel_size=size, **options)

    assert asked(2).status_code == 400 and "fixed" in asked(2).json()["error"]["message"]
    for size in (0, 1025):
        assert asked(size).status_code == 400 and asked(size).json()["error"]["param"] == "new_data_parallel_size"
    assert asked(2, headers=headers).status_code == 403
    assert server.client.post("/scale_elastic_ep", json={"new_data_parallel_size": 2}).status_code == 404, "not enabled"
