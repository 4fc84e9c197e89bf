"""Codex, unmodified, reads and edits a file on disk. The demo model writes its calls."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.server import KEY, serving
from tests.interop import node_packages
from tests.interop.harness import CONTEXT, SERVER, Harness
from tests.waiting import PATIENCE

CODEX = node_packages.FOLDER / ".bin" / "codex"
# The settings of docs/compatibility.md, and a short prompt.
CONFIG = """\
model = "demo"
model_provider = "jaxvllm"
model_catalog_json = "{home}/models.json"
include_permissions_instructions = false
include_environment_context = false
[skills]
include_instructions = false
[skills.bundled]
enabled = false
[features]
shell_snapshot = false
[model_providers.jaxvllm]
name = "jaxvllm"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "JAXVLLM_API_KEY"
"""
# So that Codex offers `apply_patch` as a custom tool with a grammar, as it does to OpenAI's models.
MODEL = {
    "slug": "demo",
    "display_name": "demo",
    "description": "",
    "base_instructions": "You edit files.",
    "apply_patch_tool_type": "freeform",
    "shell_type": "unified_exec",
    "context_window": CONTEXT,
    "truncation_policy": {"mode": "tokens", "limit": 1000},
    "supported_reasoning_levels": [],
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "supports_parallel_tool_calls": False,
    "experimental_supported_tools": [],
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
}
PATCH = """\
*** Begin Patch
*** Update File: paint.py
@@
-colour = 'red'
+colour = 'blue'
*** End Patch
"""
SAID = "The file is blue now."


def narrowed(turn: int, body: dict[str, Any]) -> dict[str, Any]:
    """Returns a request that must read the file, then patch it, then say `SAID`."""
    match turn:
        case 0:
            schema = {"type": "object", "properties": {"cmd": {"const": "cat paint.py"}}, "required": ["cmd"]}
            change: dict[str, Any] = {"parameters": schema | {"additionalProperties": False}}
            choice = {"type": "function", "name": "exec_command"}
        case 1:
            lines = "\n".join(f"LINE{number}: {json.dumps(line)}" for number, line in enumerate(PATCH.splitlines(True)))
            names = " ".join(f"LINE{number}" for number in range(PATCH.count("\n")))
            change = {"format": {"type": "grammar", "syntax": "lark", "definition": f"start: {names}\n{lines}\n"}}
            choice = {"type": "custom", "name": "apply_patch"}
        case _:
            return body | {"tool_choice": "none", "structured_outputs": {"choice": [SAID]}}
    tools = [tool | change if tool.get("name") == choice["name"] else tool for tool in body["tools"]]
    return body | {"tools": tools, "tool_choice": choice}


def codex(url: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs Codex's command line for one task in `folder`, with nothing of this machine's settings."""
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=url, home=home))
    (home / "models.json").write_text(json.dumps({"models": [MODEL]}))
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "JAXVLLM_API_KEY": KEY}
    command = [CODEX, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Paint it blue."]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.slow
def test_codex_edits_a_file(tmp_path: Path) -> None:
    node_packages.need(CODEX.exists())
    folder = tmp_path / "task"
    folder.mkdir()
    file = folder / "paint.py"
    file.write_text("colour = 'red'\n")
    with serving(tmp_path / "log", SERVER) as server:
        harness = Harness(f"http://127.0.0.1:{server.port}", "/v1/responses", narrowed)
        with harness.listening() as url:
            done = codex(url, folder, tmp_path / "home")

    assert done.returncode == 0, (done.stdout, done.stderr, harness.answered)
    assert file.read_text() == "colour = 'blue'\n"
    assert done.stdout.strip() == SAID
    assert {status for path, status in harness.answered if path == "/v1/responses"} == {200}, harness.answered
    first, second, third = harness.asked
    read, patched = second["input"][-2:], third["input"][-2:]
    assert [item["type"] for item in read + patched] == [
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ]
    assert "colour = 'red'" in read[1]["output"] and patched[0]["input"] == PATCH
    assert {"function", "custom", "namespace", "web_search"} <= {tool["type"] for tool in first["tools"]}
