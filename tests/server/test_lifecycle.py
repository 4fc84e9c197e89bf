"""A real server from its first line to its last, and that no process of it is ever left.

`tests/faults` has the second signal, the end of the server by kill -9, and models that cannot be read.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from jaxvllm.cli.serve import main
from jaxvllm.server import lifecycle
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.lifecycle import StopSignals, until_first
from tests.processes import is_alive, stopped
from tests.server.conftest import ENGINE
from tests.waiting import PATIENCE, wait_until

# Those of the server in conftest.py: compiled once for both.
SHAPES = [
    f"--{name.replace('_', '-')}={value[0] if isinstance(value, tuple) else value}" for name, value in ENGINE.items()
]
LONG = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True, "stream": True, "temperature": 0}


class Server:
    """`python -m jaxvllm.serve`, and what it wrote."""

    def __init__(self, directory, *flags, **environment):
        self._log = directory / f"log-{time.monotonic_ns()}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxvllm.serve", "--port", "0", *SHAPES, *flags],
                stderr=log,
                stdout=log,
                env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
                start_new_session=True,
            )

    @property
    def log(self):
        return self._log.read_text()

    def until(self, pattern):
        """The first match in what it writes."""
        return self.wait_for(lambda: re.search(pattern, self.log))

    @property
    def url(self):
        return self.until(r"listening on (http://127\.0\.0\.1:\d+)")[1]

    def engine(self):
        """The engine's process id."""
        return self.wait_for(lambda: next(iter(children(self.process.pid)), None))

    def ready(self):
        self.until("ready after")
        return self

    def signal_all(self, number):
        """To every process, as a terminal and systemd do."""
        os.killpg(self.process.pid, number)

    def end(self):
        return self.process.wait(PATIENCE)

    def wait_for(self, condition):
        """What `condition` finds, at last. Fails when the server ends before."""

        def look():
            found = condition()
            assert found or self.process.poll() is None, self.log
            return found

        return wait_until(look, lambda: self.log)


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture
def start(directory):
    servers = []

    def start(*flags):
        servers.append(Server(directory, *flags))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@contextmanager
def open_streams(server, count):
    """Streams whose first event has come, and a client. The engine is stopped, so that none of them ends by itself."""
    engine = server.engine()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        responses = [client.send(client.build_request("POST", "/v1/completions", json=LONG), stream=True)]
        while len(responses) < count:
            responses.append(client.send(client.build_request("POST", "/v1/completions", json=LONG), stream=True))
        lines = [response.iter_lines() for response in responses]
        for each in lines:
            assert next(each).startswith("data: ")
        with stopped(engine):
            yield client, lines, lambda: os.kill(engine, signal.SIGCONT)


def get(server, path):
    return httpx.get(f"{server.url}{path}", timeout=PATIENCE)


def events(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def test_sigterm_lets_requests_finish(start):
    server = start("--shutdown-timeout", "100000")
    engine = server.engine()
    with ThreadPoolExecutor() as early:
        with stopped(engine):  # it starts no further
            assert get(server, "/live").status_code == 200
            for path in ("/health", "/ready"):
                not_ready = get(server, path)
                assert not_ready.status_code == 503 and "starting" in not_ready.text
            # Scripts for vLLM take any answer for the sign that requests are taken.
            waiting = [early.submit(get, server, path) for path in ("/v1/models", "/v1/completions")]
            assert get(server, "/metrics").status_code == 200
            assert not any(each.done() for each in waiting), [each.result().text for each in waiting if each.done()]
        assert [each.result().status_code for each in waiting] == [200, 405]
    assert get(server, "/health").status_code == get(server, "/ready").status_code == 200
    server.ready()
    with open_streams(server, 2) as (client, streams, go_on), ThreadPoolExecutor(1) as thread:
        # The engine does not queue it while it is stopped, as if it compiled the form.
        unqueued = thread.submit(client.post, "/v1/completions", json=LONG | {"structured_outputs": {"choice": ["x"]}})
        wait_until(lambda: client.get("/load").json()["server_load"] == 3)
        server.signal_all(signal.SIGTERM)
        server.until(r"stopping: 3 requests may finish within 100000 s")
        refused = unqueued.result()
        assert refused.status_code == 503 and "shutting down" in refused.text
        refusal = client.post("/v1/completions", json=LONG)
        assert refusal.status_code == 503 and refusal.headers["retry-after"], refusal.text
        assert client.get("/ready").status_code == 503
        go_on()
        for lines in streams:
            *chunks, done = events(lines)
            assert done == "[DONE]"
            assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert server.end() == 0
    assert not is_alive(engine)
    assert "Traceback" not in server.log and "ERROR" not in server.log


def test_requests_that_take_too_long_get_an_error_event(start):
    server = start("--shutdown-timeout", "0.01").ready()
    engine = server.engine()
    with open_streams(server, 1) as (_, [lines], _):
        server.process.terminate()
        rest = list(lines)
    assert "event: error" in rest
    assert json.loads(events(rest)[-2])["error"]["message"]
    assert server.end() == 1
    assert not is_alive(engine) and "Traceback" not in server.log


def test_ctrl_c_while_the_engine_loads(start):
    server = start()
    engine = server.engine()
    server.signal_all(signal.SIGINT)
    assert server.end() == 130
    assert not is_alive(engine) and "Traceback" not in server.log


def test_a_port_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"jaxvllm serve: cannot listen on 127.0.0.1:{port}: Address already in use; choose .*\n", error
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "99999"], "port must be from 0 to 65535, not 99999"),
        (["a", "--model", "b"], "the model is a and --model b: give one"),
        (["--api-key-file", "/no/such/file"], "api_key_file /no/such/file cannot be read: No such file or directory"),
        (["--ssl-certfile", "x"], "ssl_certfile and ssl_keyfile belong together: give both, or none"),
    ],
)
def test_wrong_options_are_one_line(argv, message, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err == f"jaxvllm serve: {message}\n"


def test_help_imports_neither_jax_nor_the_web_framework():
    program = "import sys, jaxvllm.cli.serve as s\ntry: s.main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--shutdown-timeout" in done.stdout
    assert not {"jax", "fastapi", "uvicorn"} & set(done.stdout.splitlines()[-1].split())


@pytest.fixture
def hangup_is_heard():
    """As in a terminal: below nohup SIGHUP is ignored, and so it is by a server."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_is_heard")
def test_drain_waits_no_longer_than_it_may():
    assert ServerConfig().shutdown_timeout == 30
    idle = asyncio.Event()
    service = SimpleNamespace(drain=lambda: None, num_open=1, idle=idle.wait)
    service.config = SimpleNamespace(shutdown_timeout=0.05)

    async def run():
        with StopSignals() as stop:
            assert not await lifecycle.drain(service, stop)
            service.config.shutdown_timeout = 60
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert not await lifecycle.drain(service, stop)
            assert stop.first is signal.SIGHUP and stop.is_urgent
            service.num_open = 0
            assert await lifecycle.drain(service, stop)

    asyncio.run(run())


def test_until_first_raises_what_ended_it():
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(until_first(asyncio.sleep(60), fail()))


@pytest.mark.slow  # two processes join, compile and part: 15 s
def test_the_same_command_on_every_host(tmp_path):
    """The environment says who is first. That one serves; the other listens, is never ready, and ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2"}
    environment["JAX_NUM_CPU_DEVICES"] = "1"
    first, second = (
        Server(tmp_path, "--multihost", "--mesh=1x2", **environment, JAX_PROCESS_ID=index) for index in "01"
    )
    try:
        first.ready()
        short = LONG | {"max_tokens": 8, "stream": False}
        answer = httpx.post(f"{first.url}/v1/completions", json=short, timeout=PATIENCE)
        assert len(answer.json()["choices"][0]["text"]) > 8
        assert get(second, "/ready").json()["status"] == "following"
        assert get(second, "/health").status_code == 503 and get(second, "/live").status_code == 200
        refusal = httpx.post(f"{second.url}/v1/completions", json=short, timeout=PATIENCE)
        assert refusal.status_code == 503
        first.process.send_signal(signal.SIGTERM)
        assert (first.end(), second.end()) == (0, 0)
    finally:
        for server in (first, second):
            server.process.kill()
            server.process.wait()
