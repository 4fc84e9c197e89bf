"""The Python examples of the README and docs/offline.md run, in order, as a reader would paste them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import QUICKLY
from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent


def python_examples(markdown: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", markdown, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = ("README.md", "docs/offline.md")
    examples = [text for page in pages for text in python_examples((ROOT / page).read_text(encoding="utf-8"))]
    assert len(examples) >= 3
    program = tmp_path / "readme.py"
    program.write_text("\n".join([QUICKLY, *examples, "llm.close()"]), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    done = subprocess.run([sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prompt: ") == 3
    assert done.stdout.count("a request ") == 1, "the page pool, drawn once while a request runs"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100
