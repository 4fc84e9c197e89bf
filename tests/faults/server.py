"""A real server in processes of its own, and what every fault must leave as it was."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, until, wait_until

KEY = "a-key-of-this-test"
OPTIONS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "row_buckets": 16,
    "token_buckets": 64,
    "num_pages": 300,
}
GREEDY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
# What no answer may hold: paths, tracebacks, addresses of memory.
SECRET = re.compile(r"Traceback|File \"|/root|/home|/usr/|/work|/tmp|site-packages|0x[0-9a-f]{6,}|ipc://")
# After a fault the server is looked at this often, this far apart, before it must be as it was: 5 s on a quiet machine.
# They are looks and not seconds: each goes through server and engine, and takes longer where those are slow.
LOOKS, LOOK_SECONDS = 25, 0.2


@dataclass(frozen=True)
class Answer:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """One `python -m jaxvllm.serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    expected: str = ""  # the text of GREEDY

    @property
    def engine_pid(self) -> int:
        """Of the engine's process, as it is now."""
        pid = self.find_engine()
        assert pid is not None, "there is no engine"
        return pid

    def find_engine(self) -> int | None:
        """The same, or None while there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next((int(child) for child in children if "jaxvllm.worker" in _command(int(child))), None)

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which `data` has been sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def raw(self, data: bytes) -> Answer | None:
        """The answer to `data`; None when the server closes the connection without one."""
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            with suppress(ConnectionError):  # the answer may be there before all is sent
                writer.write(data)
                await writer.drain()
            try:
                return await read_answer(reader)
            finally:
                writer.close()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a JSON request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.raw(request(path, data, headers))
        assert answer is not None, "no answer"
        return answer

    async def get(self, path: str) -> Answer:
        answer = await self.raw(request(path, b"", method="GET"))
        assert answer is not None, "no answer"
        return answer

    async def greedy(self) -> str:
        """The text of a request that nothing may change."""
        answer = await self.post("/v1/completions", GREEDY)
        assert answer.status == 200, answer.body
        return str(answer.json["choices"][0]["text"])

    async def pages_held(self) -> int:
        """Pages that requests own."""
        answer = await self.get("/playground/state")
        assert answer.status == 200, answer.body
        return sum(replica["states"].count(1) for replica in answer.json["replicas"])

    async def open_requests(self) -> int:
        """Requests that it works on."""
        return int((await self.get("/load")).json["server_load"])

    async def until_open(self, count: int) -> None:
        """Waits until it works on so many requests."""
        async with asyncio.timeout(PATIENCE):
            while await self.open_requests() != count:
                await asyncio.sleep(LOOK_SECONDS / 10)

    async def until_said(self, text: str) -> None:
        """Waits until it stands in the log."""
        await until(lambda: text in self.log.read_text())

    async def is_settled(self) -> bool:
        """Whether it is ready and holds no page."""
        try:
            return (await self.get("/ready")).status == 200 and not await self.pages_held()
        except (OSError, AssertionError, json.JSONDecodeError):
            return False

    async def settle(self) -> None:
        """Waits until it is settled; that must take no more than `LOOKS`."""
        for _ in range(LOOKS):
            if await self.is_settled():
                return
            await asyncio.sleep(LOOK_SECONDS)
        raise AssertionError(f"not as before after {LOOKS} looks: {(await self.get('/ready')).body!r}")

    async def start_again(self) -> None:
        """Waits until it is settled, while an engine starts."""
        async with asyncio.timeout(PATIENCE):
            while not await self.is_settled():
                await asyncio.sleep(LOOK_SECONDS)

    def stop(self) -> int:
        """Ends it; its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """An HTTP request."""
    base = {
        "host": "localhost",
        "authorization": f"Bearer {KEY}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in (base | dict(headers or {})).items() if v)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """The answer on a connection that the server closes after it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    try:
        body = await reader.read()
    except ConnectionError:
        body = b""
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Answer(int(first.split(" ")[1]), headers, body)


def check_error(answer: Answer, status: int | tuple[int, ...], param: str | None = None) -> None:
    """An error in OpenAI's shape, which tells nothing about this machine."""
    wanted = (status,) if isinstance(status, int) else status
    assert answer.status in wanted, f"{answer.status}, not {wanted}: {answer.body[:300]!r}"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"], error
    assert not SECRET.search(error["message"]), error
    assert len(error["message"]) < 500, "the error repeats what was sent"
    if param is not None:
        assert error["param"] == param, error


@contextmanager
def serving(
    log: Path, options: Mapping[str, Any] = OPTIONS, *flags: str, wait: bool = True, max_files: int = 4096
) -> Iterator[Server]:
    """A server, ready when it is entered, and gone with all its processes afterwards. It may open `max_files` files."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "jaxvllm.serve", "--port", "0", "--api-key", KEY, *words, *flags]
    command = limited(command, max_files)
    # With the tests' own number of devices, and so with the programs that engines of other tests have stored.
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        server = Server(process, 0, log)
        try:
            server.port = _port(process, log)
            if wait:
                asyncio.run(server.start_again())
                server.expected = asyncio.run(server.greedy())
            yield server
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                raise


@contextmanager
def routing(log: Path, server: Server, max_files: int) -> Iterator[Server]:
    """The same server through a router, which has the same key, and its own log. It may open `max_files` files."""
    command = [sys.executable, "-m", "jaxvllm", "router", "--port", "0", "--api-key", KEY]
    command += ["--backend", f"http://127.0.0.1:{server.port}"]
    with log.open("wb") as output, subprocess.Popen(limited(command, max_files), stderr=output) as process:
        try:
            yield replace(server, port=_port(process, log), log=log)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def limited(command: list[str], max_files: int) -> list[str]:
    """A command whose process may open so many files: its soft and its hard limit."""
    return ["/bin/sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh", *command]


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    def listening() -> re.Match[str] | None:
        match = re.search(r"(?:listening on|passing requests on at) http://127\.0\.0\.1:(\d+)", log.read_text())
        assert match or process.poll() is None, f"the server did not listen: {log.read_text()}"
        return match

    match = wait_until(listening, log.read_text)
    assert match is not None
    return int(match[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _unchunked(data: bytes) -> bytes:
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16) if size else 0
        if not length:
            return whole
        whole, data = whole + data[:length], data[length + 2 :]
    return whole
