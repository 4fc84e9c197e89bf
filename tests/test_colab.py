"""The notebooks run from top to bottom, as a reader would run them, on the embedded model."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


@pytest.fixture
def kernel_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel finds this checkout, and keeps its history and its compiled programs out of the user's home."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def printed(notebook: nbformat.NotebookNode) -> str:
    """What the cells printed on standard output, together."""
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def run(path: Path) -> str:
    """Executes a notebook in its own folder; an exception in a cell is one here."""
    notebook = read(path)
    # The kernel's outputs come by another channel than its "done": by default those later than 4 s are lost.
    patience = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), int(PATIENCE))
    client = NotebookClient(notebook, **patience, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    return printed(notebook)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_quickstart() -> None:
    text = run(ROOT / "colab" / "quickstart.ipynb")
    assert "Installing" not in text
    assert "first token after" in text
    # The three completions, caught at work: a letter each, and the page that they share.
    assert {"a request ", "b request ", "c request "} <= {line[:10] for line in text.splitlines()}
    assert "* shared by several requests (" in text
    hits = [line.split() for line in text.splitlines() if "prompt tokens were in the cache" in line]
    first, second = (int(words[0]) for words in hits)
    assert first == 0 and second > 0 and second % 16 == 0
    assert "num_pages_owned=0" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_stored(path: Path) -> None:
    """A stored output ages unseen and makes every difference unreadable."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
