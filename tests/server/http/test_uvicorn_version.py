"""The installed uvicorn is one that the server was tested with."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def check_version(installed: str) -> None:
    """Fails with a sentence that names the way out when pyproject.toml does not allow this version of uvicorn."""
    requirements = map(Requirement, tomllib.loads(PROJECT.read_text())["project"]["dependencies"])
    [tested] = [one.specifier for one in requirements if one.name == "uvicorn"]
    assert len(tested) == 2, f"uvicorn needs a lowest and a highest version in pyproject.toml, not {tested}"
    assert tested.contains(installed), (
        f"uvicorn {installed} is installed, and jaxvllm/server/http was tested with {tested}: install one of those, or "
        "run tests/server with this one and change the range in pyproject.toml"
    )


def test_the_installed_uvicorn_is_in_the_range() -> None:
    check_version(importlib.metadata.version("uvicorn"))


@pytest.mark.parametrize("version", ["0.30.0", "0.99.0", "1.0.0"])
def test_another_uvicorn_is_refused(version: str) -> None:
    with pytest.raises(AssertionError, match=f"uvicorn {version} is installed, and jaxvllm/server/http was tested"):
        check_version(version)
