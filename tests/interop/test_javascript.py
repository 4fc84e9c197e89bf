"""Node's `openai` and Vercel's `ai` work unmodified."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.server import KEY
from tests.interop import node_packages
from tests.waiting import PATIENCE

HERE = Path(__file__).parent
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def results(url: str) -> dict[str, Any]:
    node_packages.need(node_packages.FOLDER.is_dir() and shutil.which("node") is not None)
    done = subprocess.run(
        ["node", HERE / "clients.mjs", url, KEY], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "check",
    ["chat", "chat_stream", "chat_helper", "responses", "responses_stream"]
    + ["ai_text", "ai_stream", "ai_openai_chat", "ai_openai_responses"],
)
def test_answers(results: dict[str, Any], check: str) -> None:
    assert results[check] == ANSWER


@pytest.mark.parametrize("check", ["tools", "tools_stream", "tools_helper"])
def test_calls_of_tools(results: dict[str, Any], check: str) -> None:
    assert results[check] == [["get_weather", {"city": "Oslo"}]]


@pytest.mark.parametrize("check", ["ai_tool", "ai_openai_chat_tool", "ai_openai_responses_tool"])
def test_the_sdk_runs_a_tool_and_answers(results: dict[str, Any], check: str) -> None:
    result = results[check]
    assert (result.get("called"), result["steps"]) == ([{"city": "Oslo"}], 2), result
    assert "rainy" in result["said"]


@pytest.mark.parametrize("check", ["ai_object", "ai_openai_chat_object", "ai_openai_responses_object", "ai_output"])
def test_the_sdk_makes_an_object(results: dict[str, Any], check: str) -> None:
    assert results[check] in ({"sky": "sunny"}, {"sky": "rainy"})


def test_lists_and_counts(results: dict[str, Any]) -> None:
    assert results["models"] == ["demo"]
    assert results["completion"].startswith(" Paris.")
    assert results["abort"] == 3
    usage = results["ai_usage"]
    assert (usage["inputTokens"], usage["outputTokens"], usage["totalTokens"]) == (13, 10, 23)


@pytest.mark.parametrize(
    ("check", "name", "status", "param"),
    [
        ("bad_request", "BadRequestError", 400, "temperature"),
        ("no_model", "NotFoundError", 404, "model"),
        ("no_key", "AuthenticationError", 401, None),
    ],
)
def test_errors_are_typed(results: dict[str, Any], check: str, name: str, status: int, param: str | None) -> None:
    error = results[check]
    assert (error["name"], error["status"], error["param"]) == (name, status, param)
