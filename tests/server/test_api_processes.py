"""A server whose HTTP is answered by several processes: clients notice nothing, and one of them may die."""

import asyncio
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.processes import is_alive, stopped, wait_until_gone
from tests.router.test_kills import ENGINE, all_streams, is_ready, running
from tests.waiting import PATIENCE, wait_until

MODULE = "jaxvllm.server.api_process"


@pytest.mark.slow
def test_one_of_three_processes_is_killed_and_the_others_answer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(log, "serve", *ENGINE, "--api-server-count", "3", "--enable-elastic-ep") as server:
        wait_until(lambda: is_ready(server.url), log.read_text)

        def metric(pattern: str) -> float:
            text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
            return sum(map(float, re.findall(rf"^jaxvllm:{pattern} (\S+)$", text, re.MULTILINE)))

        def answers() -> float:
            return metric(r'http_requests_total{\S*path="/v1/completions",status="200"}')

        expected = [one.text for one in asyncio.run(all_streams(server.url))]
        assert all(expected)
        wait_until(lambda: answers() == 50, lambda: "answers of all processes count")
        assert metric(r"generation_tokens_total{\S*}") > 50, "every process knows the engine's metrics"

        # What the processes refuse, and what they ask of the engine, is as ever.
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 9999})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
        wrong = {"prompt": "a", "structured_outputs": {"regex": "("}}
        refused = httpx.post(f"{server.url}/v1/completions", json=wrong, timeout=PATIENCE)
        assert refused.status_code == 400 and "regex" in refused.json()["error"]["message"]
        state = httpx.get(f"{server.url}/playground/state", timeout=PATIENCE)
        assert len(state.json()["replicas"]) == 1
        assert httpx.post(f"{server.url}/scale_elastic_ep", json={"new_data_parallel_size": 2}).status_code == 400

        # One process is stopped: the others answer all connections, also those that it was given before.
        with stopped(server.children(MODULE)[0]):
            for _ in range(9):
                assert httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code == 200
            assert "does not answer: it gets no connections" in log.read_text()
        wait_until(lambda: "answers again" in log.read_text(), log.read_text)

        # One process dies. Its streams break off, the others are as ever, and another takes its place.
        before = server.children(MODULE)
        told = asyncio.run(all_streams(server.url, before[1]))
        assert sum(one.is_whole for one in told) >= 33, "each process has a third of the connections"
        for one, text in zip(told, expected, strict=True):
            assert one.text == text if one.is_whole else one.has_error and text.startswith(one.text)
        wait_until_gone(before[1])
        wait_until(lambda: len(server.children(MODULE)) == 3)
        wait_until(lambda: metric(r"num_http_streams{\S*}") == 0 and server.pages_held() == 0)
        again = [one.text for one in asyncio.run(all_streams(server.url))]
        assert again == expected

        # The engine dies: no process does, and all of them answer again.
        processes = server.children(MODULE)
        told = asyncio.run(all_streams(server.url, server.engine_pid()))
        for one, text in zip(told, expected, strict=True):
            assert one.text == text if one.is_whole else one.has_error
        wait_until(lambda: is_ready(server.url), log.read_text)
        assert server.children(MODULE) == processes
        assert [one.text for one in asyncio.run(all_streams(server.url))] == expected

        # It is asked to end while streams run: they finish.
        told = asyncio.run(all_streams(server.url, server.pid, by=signal.SIGTERM))
        assert sum(one.is_whole for one in told) >= 5
        assert all(one.text == text for one, text in zip(told, expected, strict=True) if one.text)
        wait_until(lambda: not any(map(is_alive, processes)), lambda: "a process is left")
