"""Writes tests/slowest.txt, the slowest tests of a run, and says how the run compares with the suite's budget.

`python -m tools.slowest_tests reports/junit.xml` reads what pytest's --junitxml wrote. `tests/conftest.py` adds the CPU
seconds of each test, which say more than wall seconds on a machine that does other work too.
"""

import argparse
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.result_files import ROOT

# Of wall time, on two quiet cores: what CI has.
BUDGET_MINUTES = 25.0
COUNT = 60
LIST = ROOT / "tests" / "slowest.txt"


@dataclass(frozen=True)
class Test:
    """One test, with its fixtures where it is the first to ask for them."""

    name: str
    seconds: float
    cpu_seconds: float  # of this process, and of those that it started and waited for


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    date: str
    seconds: float  # from its start to its end
    tests: tuple[Test, ...]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Reads a JUnit report. Raises ValueError when it is none of pytest's."""
        suite = ElementTree.parse(path).getroot().find("testsuite")
        if suite is None:
            raise ValueError(f"{path} has no <testsuite>: write it by pytest --junitxml={path}")
        tests = tuple(
            Test(
                f"{case.get('classname', '')}::{case.get('name', '')}",
                float(case.get("time", 0)),
                sum(float(one.get("value", 0)) for one in case.iter("property") if one.get("name") == "cpu_seconds"),
            )
            for case in suite.iter("testcase")
        )
        return cls(suite.get("timestamp", "")[:10], float(suite.get("time", 0)), tests)

    @property
    def cpu_seconds(self) -> float:
        return sum(test.cpu_seconds for test in self.tests)

    @property
    def summary(self) -> str:
        """Says how long the run took, and whether that is within the budget."""
        minutes = self.seconds / 60
        verdict = "within" if minutes <= BUDGET_MINUTES else "BEYOND"
        return (
            f"{len(self.tests)} tests took {minutes:.1f} minutes, {verdict} the budget of {BUDGET_MINUTES:.0f}, and "
            f"{self.cpu_seconds / 60:.1f} minutes of CPU"
        )

    def table(self, machine: str) -> str:
        """Returns the slowest tests, by CPU seconds, for a file in git."""
        slowest = sorted(self.tests, key=lambda test: (-test.cpu_seconds, test.name))[:COUNT]
        share = sum(test.cpu_seconds for test in slowest) / (self.cpu_seconds or 1)
        return "\n".join(
            [
                f"The slowest {len(slowest)} tests of {self.date} on {machine}, by python -m tools.slowest_tests.",
                f"{self.summary}; these have {share:.0%} of it.",
                "",
                f"{'CPU s':>8}{'wall s':>8}  test",
                *(f"{test.cpu_seconds:8.1f}{test.seconds:8.1f}  {test.name}" for test in slowest),
                "",
            ]
        )


def main(argv: list[str] | None = None) -> None:
    """Reads the report, writes the list where --write asks for it, and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m tools.slowest_tests", description=__doc__)
    parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
    parser.add_argument("--write", type=Path, nargs="?", const=LIST, help=f"write the list there; no path: {LIST}")
    args = parser.parse_args(argv)
    run = Run.read(args.report)
    if args.write is not None:
        args.write.write_text(run.table(f"{os.cpu_count()} cores of {platform.machine()}"), encoding="utf-8")
    print(run.summary)


if __name__ == "__main__":
    main()
