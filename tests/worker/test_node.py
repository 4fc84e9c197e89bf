"""Headless hosts, which are other processes of this machine here."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from jaxvllm.cli import serve
from jaxvllm.config import EngineConfig
from jaxvllm.worker.data_parallel import open_pool
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from jaxvllm.worker.engine_client import EngineState
from jaxvllm.worker.node_messages import SECRET_VARIABLE, read_secret, server_keys
from tests.waiting import PATIENCE, until
from tests.worker.test_engine_pool import OPTIONS, all_ready, all_streams, pages_owned

SECRET = "of this test and of nothing else"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


@contextmanager
def node(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    flags = (
        "--data-parallel-start-rank",
        "1",
        "--data-parallel-size-local",
        "1",
        "--data-parallel-rpc-port",
        str(port),
    )
    with subprocess.Popen([sys.executable, "-m", "jaxvllm.serve", "--headless", *flags]) as process:
        try:
            yield process
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_an_engine_on_a_headless_host_dies_and_comes_back(port: int) -> None:
    async def run() -> None:
        parallel = DataParallelConfig(data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=port)
        pool = open_pool(EngineConfig.from_options(**OPTIONS), parallel)
        pool.launch()
        try:
            await pool.ready()  # which it is without the host
            remote = pool.engines[1]
            assert remote.state is EngineState.STARTING
            expected = await all_streams(pool)

            async def while_streams_run(what: Any) -> None:
                streams = asyncio.create_task(all_streams(pool))
                await until(lambda: remote.num_requests > 10)
                what()
                assert await streams == expected

            with node(port) as host:
                await asyncio.wait_for(all_ready(pool), PATIENCE)
                assert await all_streams(pool) == expected
                [engine] = children(host.pid)
                await while_streams_run(lambda: os.kill(engine, signal.SIGKILL))
                await asyncio.wait_for(remote.ready(), PATIENCE)
                assert children(host.pid) != [engine]
                await while_streams_run(host.kill)  # the whole host, for good
            await until(lambda: remote.state is not EngineState.READY)
            assert await all_streams(pool) == expected
            with node(port) as host:  # and another in its place
                await asyncio.wait_for(remote.ready(), PATIENCE)
                assert await all_streams(pool) == expected
                assert await pages_owned(pool) == 0
                await pool.close()
                await until(lambda: not children(host.pid))  # it waits for another server
                host.terminate()
                assert host.wait(PATIENCE) == 0
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_secret_is_needed_and_decides_about_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ValueError, match="of at least 16 characters"):
        read_secret()
    public, private = server_keys(SECRET)
    assert zmq.curve_public(private) == public == server_keys(SECRET)[0]
    assert public != server_keys(SECRET + "!")[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headless": True}, "needs data_parallel_size_local"),
        ({"data_parallel_start_rank": 2}, "is for headless hosts"),
        ({"data_parallel_size": 0}, "must be a positive integer, not 0"),
        ({"data_parallel_backend": "k8s"}, "must be one of auto, mp, ray, in-process, not 'k8s'"),
        ({"data_parallel_rpc_port": 0}, "from 1 to 65535, not 0"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataParallelConfig(**options)


def test_numbers_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="mesh 2x1 has 2 replicas: give one of them"):
        open_pool(EngineConfig(mesh="2x1"), DataParallelConfig(data_parallel_size=3))
    with pytest.raises(ValueError, match="data_parallel_size_local is 3, more than data_parallel_size"):
        open_pool(EngineConfig(), DataParallelConfig(data_parallel_size=2, data_parallel_size_local=3))
    assert len(open_pool(EngineConfig(mesh="2x1"), DataParallelConfig()).engines) == 2
    one_process = DataParallelConfig(data_parallel_size=2, data_parallel_backend="in-process")
    [engine] = open_pool(EngineConfig(mesh="1x2"), one_process).engines
    assert engine.config.mesh == "2x2"


def test_replicas_that_share_experts_are_in_one_process() -> None:
    sharing, two = EngineConfig(mesh="1x2", enable_expert_parallel=True), DataParallelConfig(data_parallel_size=2)
    [engine] = open_pool(sharing, two).engines
    assert engine.config.mesh == "2x2" and engine.config.shares_experts
    apart = open_pool(sharing, replace(two, data_parallel_backend="mp")).engines
    assert [one.config.shares_experts for one in apart] == [False, False]
    # The mesh may say the same, with options that replicas in one process cannot have.
    kept = {"kv_connector": "peer", "kv_connector_extra_config": {"transport": "device", "secret": "2 * 8 characters"}}
    meshed = EngineConfig(mesh="2x2x2", enable_expert_parallel=True, kv_transfer_config=json.dumps(kept))
    apart = open_pool(meshed, DataParallelConfig(data_parallel_backend="mp")).engines
    assert [one.config.mesh for one in apart] == ["2x1x2"] * 2
    with pytest.raises(NotImplementedError, match="share experts in one engine: leave data_parallel_size_local out"):
        open_pool(sharing, replace(two, data_parallel_size_local=1))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"data_parallel_backend": "mp"}, "data_parallel_backend mp is for replicas of one process each"),
        ({"data_parallel_size_local": 1}, "leave data_parallel_size_local out"),
    ],
)
def test_all_processes_of_one_engine_refuse_at_once(
    option: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that joins the others first waits 300 s for process 0, which has ended."""
    monkeypatch.setattr(serve, "_follow", lambda engine: 0)
    options = {"mesh": "2x2", "enable_expert_parallel": True, "coordinator": "localhost:1", "num_processes": 2}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        open_pool(EngineConfig(**options, process_id=0), DataParallelConfig(**option))
    [(name, value)] = option.items()
    flags = "--mesh 2x2 --enable-expert-parallel --coordinator localhost:1 --num-processes 2 --process-id 1".split()
    assert serve.main(["demo", *flags, f"--{name.replace('_', '-')}", str(value)]) == 2
    assert message in capsys.readouterr().err
