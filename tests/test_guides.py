"""The guide to a new sampling parameter is followed literally, on a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quick import QUICKLY
from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs/guides/sampling_parameter.md"

# What the guide's own program does not look at: the check of values, and the way of the field through HTTP.
PROBE = """
from jaxvllm.server.protocol.completions import CompletionRequest

assert CompletionRequest(prompt="", epsilon_cutoff=0.5).chosen() == {"epsilon_cutoff": 0.5}
try:
    SamplingParams(epsilon_cutoff=2)
except ValueError as error:
    assert "epsilon_cutoff must be a number from 0 to 1" in str(error)
else:
    raise AssertionError("a probability of 2 was taken")
print("all of it works")
"""


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the guide in this language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def changes(block: str) -> Iterator[tuple[str, str]]:
    """Each pair of old and new lines of a diff that gives no line numbers. Three dots end a pair within a line."""
    for change in re.split(r"^@@\n", block, flags=re.MULTILINE):
        lines = change.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kind) for kind in (" -", " +"))
        yield old.removesuffix("...\n"), new.removesuffix("...\n")


def follow(block: str, copy: Path) -> None:
    """Makes the changes of one block. AssertionError where the file no longer has the lines that the guide names."""
    head, _, body = block.partition("\n")
    path = copy / head.removeprefix("--- ")
    text = path.read_text()
    for old, new in changes(body):
        assert text.count(old) == 1, f"{GUIDE.name} names lines that {head[4:]} has {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The product in another place, where it may be changed."""
    shutil.copytree(ROOT / "jaxvllm", tmp_path / "jaxvllm", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (tmp_path / "jaxvllm/assets").symlink_to(ROOT / "jaxvllm/assets")
    for package in ("pallas_kernels", "sharding", "tests"):
        (tmp_path / package).symlink_to(ROOT / package)
    return tmp_path


def test_the_guide_to_a_sampling_parameter_is_true(copy: Path) -> None:
    diffs, [program] = blocks("diff"), blocks("python")
    assert len(diffs) == 4, "three files and HTTP"
    for block in diffs:
        follow(block, copy)
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY + program + PROBE],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout.endswith("all of it works\n"), done.stderr


def test_a_guide_that_is_out_of_date_is_seen(copy: Path) -> None:
    with pytest.raises(AssertionError, match=r"names lines that jaxvllm/config.py has 0 times"):
        follow("--- jaxvllm/config.py\n no such line\n+another\n", copy)
