"""A proxy between an agent's command line and the server, which makes a small model do a task."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.faults.server import OPTIONS
from tests.waiting import PATIENCE

# The prompts of Claude Code have 2,300 tokens of the demo model, whose tokens are short, and those of Codex 4,200.
CONTEXT = 8192
# The options of the server.
SERVER = OPTIONS | {
    "max_num_batched_tokens": 512,
    "token_buckets": 512,
    "max_model_len": CONTEXT,
    "num_pages": CONTEXT // 16 + 100,
    "hf_overrides": json.dumps({"max_position_embeddings": CONTEXT}),
    "override_generation_config": json.dumps({"temperature": 0}),
}

type Body = dict[str, Any]


class Harness:
    """Passes everything on, but narrows the requests of turns: such as to a tool that must be called, and its input.

    The server's grammar makes the model keep to it.
    """

    def __init__(self, target: str, path: str, narrowed: Callable[[int, Body], Body]):
        """`narrowed` returns what the server gets instead of a body for `path`, by the number of the turn, from 0."""
        self._target = target
        self._path = path
        self._narrowed = narrowed
        self.asked: list[Body] = []  # the bodies as the client sent them
        self.answered: list[tuple[str, int]] = []  # path and status

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Listens, and yields the address."""
        harness = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...

            def do_HEAD(self) -> None:
                self._pass_on(b"")

            def do_GET(self) -> None:
                self._pass_on(b"")

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.path.partition("?")[0] == harness._path:
                    body = json.loads(data)
                    harness.asked.append(body)
                    data = json.dumps(harness._narrowed(len(harness.asked) - 1, body)).encode()
                self._pass_on(data)

            def _pass_on(self, data: bytes) -> None:
                own = ("host", "content-length", "connection", "accept-encoding")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in own}
                url = harness._target + self.path
                response = httpx.request(self.command, url, content=data, headers=headers, timeout=PATIENCE)
                harness.answered.append((self.path, response.status_code))
                self.send_response(response.status_code)
                for name in ("content-type", "retry-after", "x-should-retry"):
                    if name in response.headers:
                        self.send_header(name, response.headers[name])
                self.send_header("content-length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()
