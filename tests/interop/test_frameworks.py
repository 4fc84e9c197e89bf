"""`openai-agents` and `instructor` work unmodified."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.server import KEY
from tests.waiting import PATIENCE

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".clients" / "bin" / "python"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(url: str) -> dict[str, Any]:
    if not PYTHON.is_file():
        missing = "needs the environment .clients: make .clients/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    done = subprocess.run(
        [PYTHON, HERE / "framework_clients.py", url, KEY], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("check", ["agent", "agent_stream"])
def test_an_agent_must_call_its_tool_and_then_answers(results: dict[str, Any], check: str) -> None:
    result = results[check]
    assert result.get("asked") == ["Oslo"], result
    assert "rainy" in result["said"]


MODES = ["TOOLS", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS"]
OLD_MODES = ["TOOLS_STRICT", "FUNCTIONS", "JSON_O1", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"]


def test_no_mode_of_instructor_is_left_out(results: dict[str, Any]) -> None:
    assert set(results["instructor_modes"]) == {*MODES, *OLD_MODES, "JSON", "PARALLEL_TOOLS"}


@pytest.mark.parametrize(
    "check",
    ["agent_report", "instructor_strict"]
    + [f"instructor_{mode}" for mode in (*MODES, *OLD_MODES)]
    + [f"instructor_{mode}_stream" for mode in MODES],
)
def test_an_answer_has_its_class(results: dict[str, Any], check: str) -> None:
    result = results[check]
    assert result.get("city") in ("Oslo", "Rome"), result
    assert 0 <= result["degrees"] <= 40


def test_any_object_in_json_mode(results: dict[str, Any]) -> None:
    assert results["instructor_JSON"] == {}


def test_the_model_chooses_the_calls(results: dict[str, Any]) -> None:
    assert results["instructor_PARALLEL_TOOLS"] == [["get_weather", {"city": "Oslo"}]]
