"""`make wheel` makes a file that works in an environment with its declared dependencies and without this clone."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from jaxvllm import __version__
from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".wheel" / "bin" / "python"
MAX_BYTES = 10_000_000

pytestmark = pytest.mark.slow


def printed(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What a command prints. Nothing of this process tells it where the clone is."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, env=inherited | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    # `-o`: this process's environment is as good as .venv, which may not be there.
    printed(["make", "wheel", "-o", ".venv/.stamp", f"PY={sys.executable}", f"DIST={directory}"], ROOT)
    [path] = directory.iterdir()
    return path


def test_it_is_small_and_has_every_file_of_the_packages(wheel: Path) -> None:
    assert wheel.name == f"jaxvllm-{__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < MAX_BYTES
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = ("jaxvllm", "pallas_kernels", "sharding")
    kept = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == kept
    assert {"jaxvllm/assets/demo/model.safetensors", "jaxvllm/server/playground/index.html"} <= packed


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The folder of the environment's programs, with the wheel installed."""
    if not PYTHON.is_file():
        missing = "needs the environment .wheel: make .wheel/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # Without an index: everything that it needs must be there already.
    printed([*pip, "--no-index", "--force-reinstall", "--no-deps", wheel], wheel.parent)
    printed([*pip, "--no-index", f"{wheel}[cpu]"], wheel.parent)
    return PYTHON.parent


PROGRAM = """
import json, jaxvllm
from jaxvllm import LLM, SamplingParams
with LLM(max_num_seqs=2, max_num_batched_tokens=32, num_pages=16) as llm:
    [output] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(json.dumps([jaxvllm.__file__, output.outputs[0].text, len(output.outputs[0].token_ids)]))
"""


def test_it_writes_text_without_the_clone(installed: Path, tmp_path: Path) -> None:
    caches = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"), "HOME": str(tmp_path)}
    out = printed([installed / "python", "-W", "error", "-c", PROGRAM], tmp_path, **caches)
    file, text, length = json.loads(out.splitlines()[-1])
    assert Path(file).is_relative_to(PYTHON.parent.parent)
    assert length == 8 and text.isprintable() and len(text) > 8


def test_its_commands_know_themselves(installed: Path, tmp_path: Path) -> None:
    assert printed([installed / "jaxvllm", "--version"], tmp_path) == f"jaxvllm {__version__}\n"
    found: Mapping[str, Mapping[str, object]] = json.loads(printed([installed / "jaxvllm", "env", "--json"], tmp_path))
    assert found["jaxvllm"]["version"] == __version__
    assert found["jaxvllm"]["commit"] is None
    assert Path(str(found["jaxvllm"]["location"])).is_relative_to(PYTHON.parent.parent)
    assert found["devices"]["platform"] == "cpu"
    assert found["packages"]["llvmlite"] and not found["packages"]["ray"]
