"""Runs the tests of OpenAI's and Anthropic's Python clients against a server: `python -m tools.compatibility --uv uv`.

The clients' own tests are meant for a mock that accepts everything. docs/compatibility.md tells what they found here.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.waiting import wait_until


@dataclass(frozen=True)
class Suite:
    """The tests of one client that concern what this server has."""

    package: str
    prefix: str  # of the paths, in the client's base URL
    requirements: tuple[str, ...]  # of the tests, beside what the environment has
    tests: tuple[str, ...]


SUITES = (
    Suite(
        "openai",
        "/v1",
        ("pytest-asyncio",),
        ("test_completions.py", "test_models.py", "test_responses.py", "chat", "responses"),
    ),
    Suite(
        "anthropic",
        "",
        ("pytest-asyncio", "inline-snapshot", "http-snapshot"),
        ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py"),
    ),
)
# The models that the tests ask for: all of them are the embedded one here.
NAMES = ("demo", "gpt-6-astra", "gpt-3.5-turbo-instruct", "claude-opus-5-5", "model", "model_id")


@dataclass(frozen=True)
class Outcomes:
    """Tells how the tests of a suite ended. A test of several clients (sync, async, strict, loose) is one name."""

    num_passed: int
    num_failed: int
    failures: dict[str, str]  # names and messages

    @classmethod
    def read(cls, report: Path) -> "Outcomes":
        """Reads a report of pytest's in JUnit's form."""
        counts: Counter[bool] = Counter()
        failures: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            wrong = case.find("failure") if case.find("error") is None else case.find("error")
            counts[wrong is None] += 1
            if wrong is not None:
                place = case.get("classname", "").removeprefix("tests.api_resources.").replace("Async", "")
                name = f"{place}::{case.get('name', '').partition('[')[0]}"
                failures.setdefault(name, " ".join(wrong.get("message", "").split()))
        return cls(counts[True], counts[False], failures)


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """Yields the URL of a server with the embedded model, which is ready."""
    command = [sys.executable, "-m", "jaxvllm.serve", "demo", "--port", "0", "--served-model-name", *NAMES]
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            ready = wait_until(lambda: re.search(r"ready after .*(http://\S+)", log.read_text()), log.read_text)
            assert ready is not None
            yield ready[1]
        finally:
            process.terminate()


def run(suite: Suite, uv: str, url: str, folder: Path) -> Outcomes:
    """Runs the tests of the installed client, after downloading its source into `folder`."""
    name = f"{suite.package}-{version(suite.package)}"
    download = [uv, "tool", "run", "--quiet", "--python", sys.executable, "pip", "download", "--quiet", "--no-deps"]
    download += ["--no-binary", suite.package, "--dest", str(folder), name.replace("-", "==")]
    subprocess.run(download, check=True)
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    report = folder / f"{name}.xml"
    needed = [word for requirement in suite.requirements for word in ("--with", requirement)]
    command = [uv, "run", "--quiet", "--no-project", *needed, "python", "-m", "pytest", "-q", "-o", "addopts="]
    command += ["-p", "no:xdist", "--timeout", "60", "--tb", "no", "--no-summary", f"--junitxml={report}"]
    command += [f"tests/api_resources/{path}" for path in suite.tests]
    # Tests that fail are what this is for: pytest's exit status says no more than the report.
    environment = os.environ | {"TEST_API_BASE_URL": url + suite.prefix, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": ""}
    subprocess.run(command, cwd=folder / name, env=environment, check=False)
    return Outcomes.read(report)


def main() -> None:
    """Prints a table for each suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv", help="the command uv (default: %(default)s)")
    uv = parser.parse_args().uv
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log") as url:
        for suite in SUITES:
            outcomes = run(suite, uv, url, Path(folder))
            print(f"\n{suite.package} {version(suite.package)}: {outcomes.num_passed} passed, ", end="")
            print(f"{outcomes.num_failed} failed\n\n| test | answer |\n|---|---|")
            for name, message in outcomes.failures.items():
                print(f"| {name} | {message} |")


if __name__ == "__main__":
    main()
