"""The packages of node that some clients are: CI installs them, and elsewhere their tests may be skipped."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "node_modules"


def need(is_installed: bool) -> None:
    """Skips the test if what it needs is not installed. In CI, which installs it, the test fails instead."""
    if is_installed:
        return
    if os.environ.get("CI") == "true":
        pytest.fail("CI installs node's packages: see .ci/run")
    pytest.skip("needs node, and `npm install --no-package-lock` in tests/interop")
