"""Claude Code, unmodified, reads and edits a file on disk. The demo model writes its calls."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.server import KEY, serving
from tests.interop import node_packages
from tests.interop.harness import SERVER, Harness
from tests.waiting import PATIENCE

CLAUDE = node_packages.FOLDER / ".bin" / "claude"
CALLS = ("Read", "Edit")
SAID = "The file is blue now."


def narrowed(turn: int, body: dict[str, Any], inputs: list[dict[str, str]]) -> dict[str, Any]:
    """Returns a request that must make the turn's call with its input. Once all are made, the model must say `SAID`."""
    if turn >= len(CALLS):
        schema: dict[str, Any] = {"const": SAID}
        form = {"format": {"type": "json_schema", "schema": schema}}
        return body | {"tool_choice": {"type": "none"}, "output_config": body.get("output_config", {}) | form}
    name, given = CALLS[turn], inputs[turn]
    properties = {key: {"const": value} for key, value in given.items()}
    schema = {"type": "object", "properties": properties, "required": list(given), "additionalProperties": False}
    tools = [tool | {"input_schema": schema} if tool["name"] == name else tool for tool in body["tools"]]
    return body | {"tools": tools, "tool_choice": {"type": "tool", "name": name}}


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
    node_packages.need(CLAUDE.exists())
    folder = tmp_path / "task"
    folder.mkdir()
    file = folder / "paint.py"
    file.write_text("colour = 'red'\n")
    edit = {"file_path": str(file), "old_string": "red", "new_string": "blue"}
    inputs = [{"file_path": str(file)}, edit]
    with serving(tmp_path / "log", SERVER) as server:
        target = f"http://127.0.0.1:{server.port}"
        harness = Harness(target, "/v1/messages", lambda turn, body: narrowed(turn, body, inputs))
        with harness.listening() as url:
            done = claude(url, folder, tmp_path / "home")

    assert done.returncode == 0, (done.stdout, done.stderr, harness.answered)
    assert file.read_text() == "colour = 'blue'\n"
    told = json.loads(done.stdout)
    assert (told["is_error"], told["num_turns"], told["result"].strip()) == (False, 3, json.dumps(SAID))
    assert {status for _, status in harness.answered} == {200}, harness.answered
    first, second, third = harness.asked
    assert results(first) == [] and "colour = 'red'" in results(second)[0] and "updated" in results(third)[1]
    # What earlier versions of this server refused.
    assert "system" in [message["role"] for message in first["messages"]]
    assert first["context_management"]["edits"] and first["thinking"] == {"type": "adaptive"}
    usage = told["usage"]
    assert usage["cache_read_input_tokens"] > 0 < usage["cache_creation_input_tokens"]
