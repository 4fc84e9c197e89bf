"""The notebooks run from top to bottom, as a reader would run them, on the embedded model."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from tests.quick import QUICKLY
from tests.waiting import PATIENCE

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
# By this cell jaxvllm is installed, and jax knows how many devices to have.
IMPORT = "from jaxvllm"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebooks share what they compile: their engines are of one size."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def kernel_environment(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The kernel finds this checkout, and keeps its history and its compiled programs out of the user's home."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("IPYTHONDIR", str(home / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(home / "jupyter"))
    # A reader's jax has one device, unless the notebook asks for more.
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def printed(notebook: nbformat.NotebookNode) -> str:
    """What the cells printed on standard output, together."""
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def run(name: str, *, quickly_from: str | None = None, smaller: Mapping[str, str] = {}) -> str:
    """Executes a notebook in its own folder; an exception in a cell is one here.

    From the first cell with the text `quickly_from` on, programs and engines are compiled as those of `tests/engine`:
    for notebooks that take most of their time to compile. `smaller` is what a cell has to be replaced by, where a
    reader wants a better measurement than a test.
    """
    path = ROOT / "colab" / f"{name}.ipynb"
    notebook = read(path)
    for old, new in smaller.items():
        [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        cell.source = cell.source.replace(old, new)
    if quickly_from is not None:
        place = next(place for place, cell in enumerate(notebook.cells) if quickly_from in cell.source)
        notebook.cells.insert(place, nbformat.v4.new_code_cell(QUICKLY))
    # The kernel's outputs come by another channel than its "done": by default those later than 4 s are lost.
    patience = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), int(PATIENCE))
    client = NotebookClient(notebook, **patience, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    return printed(notebook)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_quickstart() -> None:
    # Not quickly: the two other notebooks with engines of its sizes find its programs, one of them in a server.
    text = run("quickstart")
    assert "Installing" not in text
    assert "first token after" in text
    # The three completions, caught at work: a letter each, and the page that they share.
    assert {"a request ", "b request ", "c request "} <= {line[:10] for line in text.splitlines()}
    assert "* shared by several requests (" in text
    hits = [line.split() for line in text.splitlines() if "prompt tokens were in the cache" in line]
    first, second = (int(words[0]) for words in hits)
    assert first == 0 and second > 0 and second % 16 == 0
    assert "num_pages_owned=0" in text


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_structured_outputs_and_tools() -> None:
    lines = run("structured_outputs_and_tools").splitlines()
    assert "{'name': 'Zamira', 'age': 31, 'city': 'Oslo', 'job': 'painter', 'pet': 'parrot'}" in lines
    assert "called   {'name': 'get_weather', 'arguments': {'city': 'Rome'}}" in lines
    assert any(line.startswith("answered ") and "sunny" in line for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_speculative_decoding() -> None:
    # One draft a step needs fewer programs than five or three: `tests/engine/test_draft_heads.py` has several.
    fewer = {'"eagle3", 5': '"eagle3", 1', '"draft_model", 3': '"draft_model", 1'}
    text = run("speculative_decoding", quickly_from=IMPORT, smaller=fewer)
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines if "drafts were checked" in line] == ["eagle3", "draft_model"]
    # The first drafts of what was trained on this model's texts are mostly right.
    shares = [int(line.split()[2].rstrip("%")) for line in lines if line.startswith("  draft 1: ")]
    assert len(shares) == 2 and min(shares) > 50
    assert "96 tokens: " in text


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_meshes_and_planner() -> None:
    if not (ROOT / ".aot" / "bin" / "python").is_file():
        missing = "needs the environment .aot: make .aot/.stamp"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    # One mesh beside 1x1: `tests/engine/test_meshes.py` and `test_pipeline.py` have the others. One model that does not
    # fit: `tests/cli/test_plan.py` has the larger one.
    fewer = {
        '("1x2", "2x1", "2x1x1")': '("1x2",)',
        'assert plan("--model", "Llama-3.1-70B", "--device", "h200") == 1': "",
    }
    text = run("meshes_and_planner", quickly_from=IMPORT, smaller=fewer)
    assert "every mesh wrote the same tokens" in text
    assert "Llama-3.1-8B on 1x1 v5e: does not fit" in text and "about 1x2 of v5e would hold it" in text
    assert "Llama-3.1-8B on 1x2 v5e: fits" in text and "all-reduce" in text and "roofline" in text


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_serving() -> None:
    text = run("serving")
    assert "['demo']" in text and "Saturday comes after Friday." in text
    assert 'get_weather {"city": "Rome"}' in text
    assert "jaxvllm:generation_tokens_total" in text
    assert "the server ended with 0" in text


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_bring_your_own_checkpoint() -> None:
    text = run("bring_your_own_checkpoint", quickly_from=IMPORT)
    assert "'user: Hello\\nassistant: ' -> " in text
    assert "model.layers.1.mlp.up_proj.weight" in text


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_finetune() -> None:
    # The engine that is served, which is as large as the quickstart's, has the bits of its trainer, and so they are
    # compiled as ever. Eight answers are learnt in half of the steps that twenty take.
    fewer = {".splitlines()\n": ".splitlines()[:8]\n", "range(1, 41)": "range(1, 21)"}
    lines = run("finetune", smaller=fewer, quickly_from="def loss(weights)").splitlines()
    assert any(
        line.endswith("parameters are the engine's arrays") and line.split()[0] == line.split()[2] for line in lines
    )
    assert "largest difference of a log-probability: 0.0" in lines
    first, last = (int(line.split()[0]) for line in lines if line.endswith("of 8 answers are right"))
    assert first < 2 and last > 7
    assert any(line.startswith("config.json") for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_reinforcement() -> None:
    # That the reward rises takes more steps and is checked where tunix is: `tests/interop/test_tunix.py`.
    fewer = {
        "STEPS, QUESTIONS, ANSWERS = 16, 8, 8": "STEPS, QUESTIONS, ANSWERS = 2, 2, 4",
        "max_num_seqs=64, max_num_batched_tokens=256": "max_num_seqs=8, token_buckets=(32,), row_buckets=(8,)",
    }
    lines = run("reinforcement", smaller=fewer).splitlines()
    assert "largest drift: 0.0" in lines
    assert "tunix is not installed here" in lines


@pytest.mark.slow
@pytest.mark.usefixtures("kernel_environment")
def test_ladder() -> None:
    # All rungs are measured in `tests/bench/test_ladder_rungs.py`.
    two_rungs = {"requests=10": "requests=4", "chosen_rungs(NAMES)": "chosen_rungs(NAMES)[1::5]"}
    text = run("ladder", quickly_from=IMPORT, smaller=two_rungs)
    assert "Every rung gave the same tokens." in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("static ", "bursts "))}
    assert rows.keys() == {"static", "bursts"}
    assert "jaxvllm bench" not in text


def test_every_notebook_is_run_here() -> None:
    assert {f"test_{path.stem}" for path in NOTEBOOKS} <= globals().keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_stored(path: Path) -> None:
    """A stored output ages unseen and makes every difference unreadable."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def install_cell(path: Path) -> str:
    """A notebook's first code cell."""
    return next(str(cell.source) for cell in read(path).cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_notebooks_install_in_the_same_way(path: Path) -> None:
    first = install_cell(ROOT / "colab" / "quickstart.ipynb")
    assert install_cell(path).startswith(first), "its first code cell may only add packages"


def clone_around(folder: Path) -> Path:
    (folder / "pallas_kernels").mkdir()
    (folder / "colab").mkdir()
    return folder / "colab"


def clone_beside(folder: Path) -> Path:
    (folder / "jaxvllm" / "pallas_kernels").mkdir(parents=True)
    return folder


def wheel_beside(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "jaxvllm-0.1.0-py3-none-any.whl", "w"):
        pass
    return clone_beside(folder)


def nothing(folder: Path) -> Path:
    return folder


@pytest.mark.parametrize(
    ("lay_out", "wanted"),
    [
        (clone_around, "[cpu]"),
        (clone_beside, "jaxvllm[cpu]"),
        (wheel_beside, "jaxvllm-0.1.0-py3-none-any.whl[cpu]"),
        (nothing, None),
    ],
)
def test_what_is_installed(lay_out: Callable[[Path], Path], wanted: str | None, tmp_path: Path) -> None:
    """The cell as IPython runs it, where jaxvllm is not installed. What `%pip` would do is only written down."""
    cell = TransformerManager().transform_cell(install_cell(ROOT / "colab" / "quickstart.ipynb"))
    program = f"""
import sys
from pathlib import Path

sys.path[:] = [path for path in sys.path if not (Path(path) / "jaxvllm" / "__init__.py").exists()]


class Shell:
    def run_line_magic(self, name, line, *rest):
        print(name, line.format(**globals()))


def get_ipython():
    return Shell()


{cell}
"""
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=lay_out(tmp_path),
        env={"PATH": str(tmp_path)},  # without nvidia-smi
    )
    if wanted is None:
        assert "put a wheel of jaxvllm beside this notebook" in done.stderr
    else:
        separator = "" if wanted == "[cpu]" else "/"
        assert done.stdout == f'pip install --quiet "{tmp_path}{separator}{wanted}"\n', done.stderr
