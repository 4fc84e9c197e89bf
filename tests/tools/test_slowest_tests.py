"""The list of the slowest tests, and the line that says how a run compares with the budget."""

from pathlib import Path

import pytest

from tools import slowest_tests
from tools.slowest_tests import BUDGET_MINUTES, Run


def report(directory: Path, seconds: float) -> Path:
    path = directory / "junit.xml"
    cases = "".join(
        f'<testcase classname="tests.a" name="test_{number}" time="{number}"><properties>'
        f'<property name="cpu_seconds" value="{100 - number}"/></properties></testcase>'
        for number in range(100)
    )
    path.write_text(
        f'<testsuites><testsuite time="{seconds}" timestamp="2026-11-24T09:00:00">{cases}</testsuite></testsuites>'
    )
    return path


def test_the_slowest_come_first_and_the_totals_are_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slowest_tests.main([str(report(tmp_path, seconds=600)), "--write", str(tmp_path / "list")])
    lines = (tmp_path / "list").read_text().splitlines()
    summary = "100 tests took 10.0 minutes, within the budget of 25, and 84.2 minutes of CPU"
    assert lines[0].startswith("The slowest 60 tests of 2026-11-24 on ")
    assert lines[1] == f"{summary}; these have 84% of it."
    assert lines[4:] == [f"{100 - n:8.1f}{n:8.1f}  tests.a::test_{n}" for n in range(60)]
    assert capsys.readouterr().out == f"{summary}\n"


def test_a_run_beyond_the_budget_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slowest_tests.main([str(report(tmp_path, seconds=60 * BUDGET_MINUTES + 6))])
    assert "took 25.1 minutes, BEYOND the budget of 25" in capsys.readouterr().out


def test_another_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text("<coverage/>")
    with pytest.raises(ValueError, match="junit.xml has no <testsuite>: write it by pytest --junitxml="):
        Run.read(tmp_path / "junit.xml")
