"""Every row of docs/faults.md is done to a real server, and leaves it as it was.

After each: a greedy request that ran meanwhile has the text it always has, the server is ready within 5 seconds of a
quiet machine, and no request holds a page.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import CONNECTIONS, ENDLESS, LOAD, LONG, MAX_FILES, pool_of_two, streaming
from tests.faults.requests import BODIES, COMPLETIONS, HTTP, VALUES, Fault
from tests.faults.server import GREEDY, KEY, OPTIONS, Server, check_error, routing, serving
from tests.processes import stopped, wait_until_gone
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
DOC = Path(__file__).parents[2] / "docs" / "faults.md"
HARMLESS = [*BODIES, *VALUES, *HTTP, *LOAD]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("faults") / "log"
    limits = ("--max-num-queued-requests", "100", "--max-num-queued-tokens", "20000")
    with serving(log, OPTIONS, *limits, max_files=MAX_FILES) as server:
        yield server
        lines = log.read_text()
    assert "Traceback" not in lines, lines


@pytest.fixture(scope="module")
def router(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("router") / "log"
    with routing(log, server, MAX_FILES) as router:
        yield router
        lines = log.read_text()
    assert not re.search("Traceback|does not answer|is not ready", lines), lines


@pytest.mark.parametrize("fault", HARMLESS, ids=str)
def test_costs_nobody_anything(server: Server, fault: Fault) -> None:
    _suffer(server, fault)


@pytest.mark.parametrize("fault", [*HTTP, *CONNECTIONS], ids=str)
def test_costs_nobody_anything_at_the_router(router: Server, fault: Fault) -> None:
    """What a client does wrong below the API is answered as by a server, and no server is taken for dead."""
    _suffer(router, fault)


def _suffer(server: Server, fault: Fault) -> None:
    async def run() -> None:
        meanwhile = asyncio.create_task(_until_taken(server))
        await fault.do(server)
        assert await meanwhile == server.expected
        await server.settle()

    asyncio.run(run())


async def _until_taken(server: Server) -> str:
    """A greedy request by a client that asks again when the queue is full, as clients do."""
    while True:
        answer = await server.post(COMPLETIONS, GREEDY)
        if answer.status == 200:
            return str(answer.json["choices"][0]["text"])
        check_error(answer, 503)
        await asyncio.sleep(0.2)


# ---- faults that end processes, or keep them from starting ----


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("faults") / "log", OPTIONS | {"num_pages": 40}) as server:
        yield server


async def _kill_busy(server: Server) -> None:
    engine = server.engine_pid
    reader, writer = await server.send(streaming(**ENDLESS))
    await reader.readuntil(b"data: ")
    waiting = asyncio.create_task(server.post(COMPLETIONS, LONG))
    await server.until_open(2)
    os.kill(engine, signal.SIGKILL)
    rest = await reader.read()
    assert b"event: error" in rest and b"was ended by signal 9" in rest
    writer.close()
    check_error(await waiting, 500)
    with stopped(await _next_engine(server, engine)):  # while it starts
        unready = await server.get("/ready")
        refused = await server.post(COMPLETIONS, GREEDY)
    assert unready.status == 503 and unready.json["status"] == "restarting"
    check_error(refused, 503)
    assert "retry-after" in refused.headers


async def _kill_idle(server: Server) -> None:
    first = server.engine_pid
    os.kill(first, signal.SIGKILL)
    await _next_engine(server, first)  # until the server has noticed, it still takes requests for the dead one


async def _kill_twice(server: Server) -> None:
    first = server.engine_pid
    os.kill(first, signal.SIGKILL)
    os.kill(await _next_engine(server, first), signal.SIGKILL)


async def _next_engine(server: Server, first: int) -> int:
    """Its process, as soon as there is one."""
    await until(lambda: server.find_engine() not in (None, first))
    return server.engine_pid


async def _segfault(server: Server) -> None:
    first = server.engine_pid
    os.kill(first, signal.SIGSEGV)
    await _next_engine(server, first)


async def _terminate_engine(server: Server) -> None:
    os.kill(server.engine_pid, signal.SIGTERM)


async def _stop_and_go(server: Server) -> None:
    pid = server.engine_pid
    with stopped(pid):
        waiting = asyncio.create_task(server.post(COMPLETIONS, GREEDY))
        async with asyncio.timeout(PATIENCE):
            while (unready := await server.get("/ready")).status == 200:
                await asyncio.sleep(0.1)
        assert unready.json["status"] == "stuck"
        assert (await server.get("/health")).status == 200
    answer = await waiting
    assert answer.json["choices"][0]["text"] == server.expected


DEADLY = [
    Fault("kill -9 of an engine at work", _kill_busy),
    Fault("kill -9 of an idle engine", _kill_idle),
    Fault("kill -9 of an engine, and of the next one while it starts", _kill_twice),
    Fault("a crash of the engine", _segfault),
    Fault("SIGTERM to the engine", _terminate_engine),
    Fault("SIGSTOP of an engine, SIGCONT later", _stop_and_go),
    Fault("fifty requests on pages for two", pool_of_two),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", DEADLY, ids=str)
def test_the_server_survives(mortal: Server, fault: Fault) -> None:
    async def run() -> None:
        await fault.do(mortal)
        await mortal.start_again()
        assert await mortal.greedy() == mortal.expected

    asyncio.run(run())


ENDS = {
    "SIGTERM while requests run": (signal.SIGTERM, 0),
    "Ctrl-C": (signal.SIGINT, 130),
    "kill -9 of the server": (signal.SIGKILL, -9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_no_process_is_left(name: str, tmp_path: Path) -> None:
    number, code = ENDS[name]
    with serving(tmp_path / "log", OPTIONS, "--shutdown-timeout", "100000") as server:
        engine = server.engine_pid

        async def run() -> bytes:
            reader, writer = await server.send(streaming())
            await reader.readuntil(b"data: ")
            with stopped(engine):  # the request does not end yet
                server.process.send_signal(number)
                if number == signal.SIGKILL:
                    wait_until_gone(engine)  # although it cannot even see that standard input has ended
                else:
                    await server.until_said("stopping: 1 request may finish")
                    check_error(await server.post(COMPLETIONS, GREEDY), 503)
            rest = await reader.read()
            writer.close()
            return rest

        rest = asyncio.run(run())
        if number != signal.SIGKILL:
            assert b"[DONE]" in rest and b"event: error" not in rest
        assert server.process.wait(PATIENCE) == code
        wait_until_gone(engine)


def test_a_second_signal(tmp_path: Path) -> None:
    """Ctrl-C twice. `tests/server/test_lifecycle.py` has what the first does to requests."""
    with serving(tmp_path / "log", OPTIONS, "--shutdown-timeout", "100000") as server:
        engine = server.engine_pid

        async def run() -> None:
            reader, writer = await server.send(streaming())
            await reader.readuntil(b"data: ")
            with stopped(engine):  # the request does not end: what ends the server is the second signal
                server.process.send_signal(signal.SIGINT)
                await server.until_said("stopping: 1 request may finish")
                server.process.send_signal(signal.SIGINT)
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
                await until(lambda: server.process.poll() is not None)

        asyncio.run(run())
        assert server.process.wait() == 130
        wait_until_gone(engine)
    assert "Traceback" not in server.log.read_text()


def start_and_fail(*flags: str, **environment: str) -> tuple[int, str]:
    """Exit code and standard error of a server that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxvllm.serve", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | environment,
    )
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("jaxvllm serve: ")
    return done.returncode, last


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    demo = Path(__file__).parents[2] / "jaxvllm" / "assets" / "demo"
    shutil.copytree(demo, tmp_path / "model")
    return tmp_path / "model"


def test_a_port_in_use(server: Server) -> None:
    code, line = start_and_fail("--port", str(server.port))
    assert code == 1 and f"cannot listen on 127.0.0.1:{server.port}" in line


def test_a_truncated_shard(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    code, line = start_and_fail("--model", str(checkpoint))
    assert code == 2 and "model.safetensors" in line


def test_a_config_that_is_no_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    code, line = start_and_fail("--model", str(checkpoint))
    assert code == 2 and "config.json" in line


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    code, line = start_and_fail("--api-key-file", str(tmp_path / "none"))
    assert code == 2 and "api_key_file" in line


def test_a_mesh_that_is_too_large() -> None:
    code, line = start_and_fail("--mesh", "1x9")
    assert code == 2 and "mesh 1x9 needs 9 devices" in line


def test_a_directory_for_sockets_that_is_too_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code, line = start_and_fail(TMPDIR=str(long))
    assert code in (1, 2) and "TMPDIR" in line


def test_no_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with serving(tmp_path / "log", OPTIONS | {"model": checkpoint}, wait=False) as server:

        async def run() -> None:
            await server.start_again()
            check_error(await server.post(COMPLETIONS, GREEDY), 400)
            answer = await server.post(COMPLETIONS, GREEDY | {"prompt": [5, 6, 7]})
            assert answer.status == 200 and answer.json["choices"][0]["text"] == ""

        asyncio.run(run())


def test_a_cache_directory_that_is_read_only(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    # root may write everywhere: a file in its place stops root too.
    (tmp_path / "file").write_text("")
    with serving(tmp_path / "log", OPTIONS | {"compilation_cache": tmp_path / "file" / "cache"}) as server:
        assert asyncio.run(server.greedy()) == server.expected


STARTS = {
    "a port in use",
    "a truncated shard",
    "a config that is no JSON",
    "a key file that is not there",
    "a mesh that is too large",
    "a directory for sockets that is too long",
    "no tokenizer",
    "a cache directory that is read-only",
    "a second signal",
}


def test_the_list_is_whole() -> None:
    """docs/faults.md has the rows that are run here, and no others."""
    rows = re.findall(r"^\| \d+ \| (.*?) \|", DOC.read_text(), re.MULTILINE)
    tested = {fault.name for fault in (*HARMLESS, *DEADLY)} | set(ENDS) | STARTS
    assert set(rows) == tested
    assert len(rows) == len(tested) >= 60
    for name in STARTS:
        function = "test_" + re.sub(r"\W+", "_", name.lower())
        assert function in globals(), function


def test_the_key_is_in_no_log(server: Server) -> None:
    assert KEY not in server.log.read_text()
