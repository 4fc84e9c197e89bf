"""Servers end with kill -9 while fifty streams run through the router. Each stream is whole, or says that it is not."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.faults.server import OPTIONS
from tests.processes import stopped, wait_until_gone
from tests.waiting import PATIENCE, until, wait_until

NUM_STREAMS = 50
# The engine of tests/faults: one of them all compiles the programs.
ENGINE = tuple(word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value)))
# Prompts of several pages, all different.
PROMPTS = [
    f"Once upon a time there were {n} frogs who lived in a small pond near the old mill. One day" for n in range(50)
]
LISTENING = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Process:
    """A server or a router."""

    pid: int
    url: str

    def engine_pid(self) -> int:
        """The engine's process of a server."""
        [found] = self.engine_pids()
        return found

    def engine_pids(self) -> list[int]:
        """The processes of a server's engines."""
        return self.children("jaxvllm.worker")

    def children(self, module: str) -> list[int]:
        """The processes of this one that run a module."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        return [pid for pid, command in commands.items() if module.encode() in command]

    def num_open(self) -> int:
        """The requests that a server works on."""
        return int(httpx.get(f"{self.url}/load", timeout=PATIENCE).json()["server_load"])

    def pages_held(self) -> float:
        """The share of pages that requests own."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        [value] = re.findall(r"^jaxvllm:kv_cache_usage_perc\S* (\S+)$", text, re.MULTILINE)
        return float(value)


@contextmanager
def running(log: Path, command: str, *arguments: str) -> Iterator[Process]:
    with log.open("wb") as file:
        words = [sys.executable, "-m", "jaxvllm", command, "--port", "0", *arguments]
        environment = os.environ | {"JAXVLLM_KV_SECRET": "the secret of this test"}
        process = subprocess.Popen(words, stderr=file, env=environment)
    try:
        found = wait_until(lambda: LISTENING.search(log.read_text()), log.read_text)
        yield Process(process.pid, f"http://127.0.0.1:{found[1]}")
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Told:
    """What a stream said."""

    text: str = ""
    is_whole: bool = False
    has_error: bool = False


async def stream(client: httpx.AsyncClient, url: str, number: int, told: Told) -> None:
    body = {"prompt": PROMPTS[number], "max_tokens": 60, "seed": number, "temperature": 0.8, "stream": True}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    told.is_whole = not told.has_error
                elif line.startswith("data: "):
                    event = json.loads(data)
                    told.has_error |= "error" in event
                    told.text += "".join(choice["text"] for choice in event.get("choices", ()))
            if answer.status_code != 200:
                told.has_error = True
    except httpx.HTTPError:
        told.has_error = True


async def all_streams(url: str, kill: int | None = None, by: signal.Signals = signal.SIGKILL) -> list[Told]:
    """What all streams said, of whose servers process `kill` is ended when five of them have begun."""
    told = [Told() for _ in range(NUM_STREAMS)]
    async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
        asked = [asyncio.create_task(stream(client, url, number, told[number])) for number in range(NUM_STREAMS)]
        if kill is not None:
            await until(lambda: sum(bool(one.text) for one in told) >= 5)
            os.kill(kill, by)
        await asyncio.gather(*asked)
    return told


async def break_off(router: Process, server: Process) -> list[Told] | None:
    """What all streams said when the router was ended while its only server worked on some of them.

    The engine is stopped before, so that these cannot end. None if it had already answered all of them: then the router
    goes on.
    """
    told = [Told() for _ in range(NUM_STREAMS)]
    async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
        asked = [asyncio.create_task(stream(client, router.url, n, told[n])) for n in range(NUM_STREAMS)]
        await until(lambda: sum(bool(one.text) for one in told) >= 5)
        with stopped(server.engine_pid()):
            is_at_work = server.num_open() > 0
            if is_at_work:
                os.kill(router.pid, signal.SIGKILL)
                await asyncio.gather(*asked)
        await asyncio.gather(*asked)
    return told if is_at_work else None


@pytest.mark.slow
def test_streams_are_whole_or_say_that_they_are_not(tmp_path: Path) -> None:
    def peer(role: str) -> tuple[str, str]:
        return "--kv-transfer-config", json.dumps({"kv_connector": "peer", "kv_role": role})

    with ExitStack() as stack:

        def start(name: str, command: str, *arguments: str) -> Process:
            return stack.enter_context(running(tmp_path / name, command, *arguments))

        prefill = start("prefill", "serve", *ENGINE, *peer("producer"))
        decode = [start(f"decode{n}", "serve", *ENGINE, *peer("consumer")) for n in range(2)]
        for server in (prefill, *decode):
            wait_until(lambda server=server: is_ready(server.url), lambda: "a server is not ready")
        urls = ("--prefill", prefill.url, "--decode", decode[0].url, "--decode", decode[1].url)
        router = start("router", "router", *urls, "--probe-seconds", "0.2")
        wait_until(lambda: is_ready(router.url), lambda: "the router is not ready")

        expected = [one.text for one in asyncio.run(all_streams(decode[0].url))]
        assert all(expected)
        told = asyncio.run(all_streams(router.url))
        assert [(one.text, one.is_whole) for one in told] == [(text, True) for text in expected]

        # An engine that decodes: its streams say so, the others are as ever, and its server starts another.
        told = asyncio.run(all_streams(router.url, decode[0].engine_pid()))
        assert any(one.is_whole for one in told) and any(one.has_error for one in told)
        for one, text in zip(told, expected, strict=True):
            assert one.text == text if one.is_whole else one.has_error and text.startswith(one.text)
        wait_until(lambda: is_ready(decode[0].url), lambda: "the server has no engine again")

        # The prefill server, for good: prompts are computed elsewhere, and every stream is whole.
        told = asyncio.run(all_streams(router.url, prefill.pid))
        wait_until_gone(prefill.pid)
        assert [(one.text, one.is_whole) for one in told] == [(text, True) for text in expected]

        # A decode server, for good: the next requests go to the other one.
        told = asyncio.run(all_streams(router.url, decode[1].pid))
        for one, text in zip(told, expected, strict=True):
            assert one.text == text if one.is_whole else one.has_error and text.startswith(one.text)
        assert [one.text for one in asyncio.run(all_streams(router.url))] == expected
        wait_until(lambda: decode[0].pages_held() == 0, lambda: "pages are lost")

        # The router: its streams break off, and the servers stop working for them.
        told = wait_until(lambda: asyncio.run(break_off(router, decode[0])))
        assert any(one.has_error for one in told)
        for one, text in zip(told, expected, strict=True):
            assert one.text == text if one.is_whole else one.has_error and text.startswith(one.text)
        wait_until(lambda: decode[0].pages_held() == 0, lambda: "pages are lost")
        again = start("router2", "router", "--backend", decode[0].url)
        wait_until(lambda: is_ready(again.url), lambda: "the router is not ready")
        assert [one.text for one in asyncio.run(all_streams(again.url))] == expected
