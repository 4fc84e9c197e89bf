"""`benchmarks.first_light` runs whole on a CPU, and no part hides what another found."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_light, result_files

PARTS = ("errors", "attention", "0.6B", "peers", "transformers")  # at this size 8B is the same as 0.6B


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    return tmp_path


def run(results: Path, monkeypatch: pytest.MonkeyPatch, *argv: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["first_light", *argv])
    first_light.main()
    [path] = results.iterdir()
    record: dict[str, Any] = json.loads(path.read_text())
    return record["parts"]


@pytest.mark.slow
def test_all_of_it_on_a_cpu(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parts = run(results, monkeypatch, "--size", "tiny", "--parts", *PARTS)
    assert {name: part["problem"] for name, part in parts.items()} == dict.fromkeys(parts)
    worst = [fact for fact in parts["errors"]["facts"] if "error" in fact]
    assert all(fact["error"] <= fact["limit"] and not fact["failed"] for fact in worst) and len(worst) == 1
    engine = {fact["what"]: fact for fact in parts["0.6B"]["facts"]}
    assert list(engine) == [
        "engine takes requests",
        "first token",
        "every program compiled",
        "prefill of 40",
        "decode step of 1 rows",
        "decode step of 4 rows",
        "kernels of 6 steps of 4 rows, and of their prompts",
        "6 requests of 12 in and 4 out",
    ]
    assert engine["decode step of 4 rows"]["seconds"] > 0
    assert 0 <= engine["6 requests of 12 in and 4 out"]["device_idle_share"] < 1
    assert any(fact["seconds"] for fact in parts["peers"]["facts"])
    assert "transformers" in parts["transformers"]["facts"][0]["what"]  # it may not be installed
    assert "of the copy bandwidth" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_leaves_the_others(
    results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stand-ins for the parts, in their own processes: one tells a fact and fails, one tells a fact and hangs."""
    program = tmp_path.parent / "stand_in.py"
    program.write_text(
        "import sys, time\n"
        "name = sys.argv[-1]\n"
        'print(\'{"what": "%s"}\' % name, flush=True)\n'
        "if name == 'errors': raise SystemExit('out of luck')\n"
        "if name == 'attention': time.sleep(600)\n"
    )
    popen = first_light.subprocess.Popen
    monkeypatch.setattr(
        first_light.subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, program, command[-1]], **options),
    )
    monkeypatch.setitem(first_light.LIMITS, "attention", 5)
    parts = run(results, monkeypatch, "--parts", "errors", "attention", "peers")
    assert {name: [fact["what"] for fact in part["facts"]] for name, part in parts.items()} == {
        "errors": ["errors"],
        "attention": ["attention"],
        "peers": ["peers"],
    }
    assert parts["errors"]["problem"] == "ended with status 1: out of luck"
    assert parts["attention"]["problem"] == "cut off after 5 s"
    assert parts["peers"]["problem"] is None


def test_when_the_time_is_over_no_part_starts(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = run(results, monkeypatch, "--minutes", "0", "--parts", "errors")
    assert parts["errors"] == {"facts": [], "problem": "no time left", "seconds": pytest.approx(0, abs=1)}


def test_a_decode_step_is_told_beside_what_it_must_read() -> None:
    fact = {"what": "decode step of 8 rows", "seconds": 0.01, "steps": 32, "least_bytes": 16e9}
    line = first_light.told(fact, copy=3.2e12)
    assert line == "  decode step of 8 rows: seconds 0.01, steps 32, 50% of the copy bandwidth"
    assert "bandwidth" not in first_light.told(fact, copy=None)
