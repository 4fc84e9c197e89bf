"""`openai-agents`, `instructor` and `litellm` work unmodified."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.server import KEY
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".clients" / "bin" / "python"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(url: str) -> dict[str, Any]:
    return run("framework_clients", url)


@pytest.fixture(scope="module")
def litellm(url: str) -> dict[str, Any]:
    return run("litellm_client", url)


def run(script: str, url: str) -> dict[str, Any]:
    if not PYTHON.is_file():
        missing = "needs the environment .clients: make .clients/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # its import would ask the network for prices
    done = subprocess.run(
        [PYTHON, "-m", f"tests.interop.{script}", url, KEY],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
        cwd=ROOT,
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


@pytest.mark.parametrize(
    "check",
    ["text", "hosted_vllm", "anthropic", "stream", "hosted_vllm_stream", "anthropic_stream", "async", "responses"],
)
def test_litellm_gets_answers(litellm: dict[str, Any], check: str) -> None:
    assert litellm[check] == "The capital of France is Paris."


@pytest.mark.parametrize("check", ["tool", "tool_required", "tool_stream", "hosted_vllm_tool", "anthropic_tool"])
def test_litellm_gets_calls_of_tools(litellm: dict[str, Any], check: str) -> None:
    assert litellm[check] == ["get_weather", {"city": "Oslo"}, "tool_calls"]


def test_litellm_sends_what_a_tool_found(litellm: dict[str, Any]) -> None:
    assert "rainy" in litellm["tool_answer"]


@pytest.mark.parametrize("check", ["report", "hosted_vllm_report"])
def test_litellm_gets_forms(litellm: dict[str, Any], check: str) -> None:
    assert litellm[check].get("city") in ("Oslo", "Rome"), litellm[check]
    assert litellm["choice"] in ("left", "right")


def test_litellm_completes_and_counts(litellm: dict[str, Any]) -> None:
    assert litellm["completion"].startswith(" Paris.")
    usage = litellm["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (13, 10, 23)


@pytest.mark.parametrize(
    ("check", "name", "status"),
    [
        ("bad_request", "BadRequestError", 400),
        ("too_long", "ContextWindowExceededError", 400),
        ("no_model", "NotFoundError", 404),
        ("no_key", "AuthenticationError", 401),
    ],
)
def test_litellm_knows_the_errors(litellm: dict[str, Any], check: str, name: str, status: int) -> None:
    assert litellm[check] == [name, status]
