"""Claude Code, unmodified, reads and edits a file on disk. The demo model writes its calls."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.server import KEY, OPTIONS, serving
from tests.waiting import PATIENCE

CLAUDE = Path(__file__).parent / "node_modules" / ".bin" / "claude"
# The prompts have 2,300 tokens of the demo model, whose tokens are short.
CONTEXT = 8192
SERVER = OPTIONS | {
    "max_num_batched_tokens": 512,
    "token_buckets": 512,
    "max_model_len": CONTEXT,
    "num_pages": CONTEXT // 16 + 100,
    "hf_overrides": json.dumps({"max_position_embeddings": CONTEXT}),
    "override_generation_config": json.dumps({"temperature": 0}),
}


class Harness:
    """A proxy that makes a small model do a task: it says which tool to call next, and narrows the call to one input.

    All else is passed on as it came, and the server's grammar makes the model keep to it. Once the calls are made, the
    model must say `SAID`.
    """

    SAID = "The file is blue now."

    def __init__(self, target: str, calls: list[tuple[str, dict[str, str]]]):
        self._target = target
        self._calls = calls
        self.asked: list[dict[str, Any]] = []  # the bodies as Claude Code sent them
        self.answered: list[tuple[str, int]] = []  # path and status

    def narrowed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body that the server gets instead of the next one."""
        if len(self.asked) > len(self._calls):
            schema = {"const": self.SAID}
            form = {"format": {"type": "json_schema", "schema": schema}}
            return body | {"tool_choice": {"type": "none"}, "output_config": body.get("output_config", {}) | form}
        name, given = self._calls[len(self.asked) - 1]
        properties = {key: {"const": value} for key, value in given.items()}
        schema = {"type": "object", "properties": properties, "required": list(given), "additionalProperties": False}
        tools = [tool | {"input_schema": schema} if tool["name"] == name else tool for tool in body["tools"]]
        return body | {"tools": tools, "tool_choice": {"type": "tool", "name": name}}

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
                if self.path.startswith("/v1/messages?"):
                    harness.asked.append(json.loads(data))
                    data = json.dumps(harness.narrowed(harness.asked[-1])).encode()
                self._pass_on(data)

            def _pass_on(self, data: bytes) -> None:
                own = ("host", "content-length", "connection", "accept-encoding")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in own}
                response = httpx.request(
                    self.command, harness._target + self.path, content=data, headers=headers, timeout=PATIENCE
                )
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


def claude(url: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs Claude Code's command line for one task in `folder`, with nothing of this machine's settings."""
    options = ["--tools", "Read,Edit,Agent", "--system-prompt", "You edit files.", "--permission-mode", "acceptEdits"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    command = [CLAUDE, "-p", "Paint it blue.", "--model", "demo", "--output-format", "json", *options]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


def results(body: dict[str, Any]) -> list[str]:
    """Returns the results of tools in a request."""
    blocks = [block for message in body["messages"] if message["role"] == "user" for block in message["content"]]
    return [block["content"] for block in blocks if block["type"] == "tool_result"]


@pytest.mark.slow
def test_claude_code_edits_a_file(tmp_path: Path) -> None:
    if not CLAUDE.exists():
        if os.environ.get("CI") == "true":
            pytest.fail("CI installs node's packages: see .ci/run")
        pytest.skip("needs `npm install --no-package-lock` in tests/interop")
    folder = tmp_path / "task"
    folder.mkdir()
    file = folder / "paint.py"
    file.write_text("colour = 'red'\n")
    calls = [
        ("Read", {"file_path": str(file)}),
        ("Edit", {"file_path": str(file), "old_string": "red", "new_string": "blue"}),
    ]
    with serving(tmp_path / "log", SERVER) as server:
        harness = Harness(f"http://127.0.0.1:{server.port}", calls)
        with harness.listening() as url:
            done = claude(url, folder, tmp_path / "home")

    assert done.returncode == 0, (done.stdout, done.stderr, harness.answered)
    assert file.read_text() == "colour = 'blue'\n"
    told = json.loads(done.stdout)
    assert (told["is_error"], told["num_turns"], told["result"].strip()) == (False, 3, json.dumps(Harness.SAID))
    assert {status for _, status in harness.answered} == {200}, harness.answered
    first, second, third = harness.asked
    assert results(first) == [] and "colour = 'red'" in results(second)[0] and "updated" in results(third)[1]
    # What earlier versions of this server refused.
    assert "system" in [message["role"] for message in first["messages"]]
    assert first["context_management"]["edits"] and first["thinking"] == {"type": "adaptive"}
    usage = told["usage"]
    assert usage["cache_read_input_tokens"] > 0 < usage["cache_creation_input_tokens"]
