"""The compiler's process: what it says crosses the pipe, and its death is a message."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxvllm.planner import compile_worker
from jaxvllm.planner.compiler import Findings, Refusal, compile_in_child, from_json, to_json
from jaxvllm.planner.hlo import UnreadableHlo
from tests.planner.deployments import TINY, deployment
from tests.quick import QUICKLY

ROOT = Path(__file__).parents[2]

type MakePython = Callable[[str], None]


def in_place_of_python(program: str, directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Puts a program in the place of the interpreter that compiles."""
    path = directory / "python"
    path.write_text(f"#!{sys.executable}\nimport os, sys\n{program}\n")
    path.chmod(0o755)
    patch.setattr(sys, "executable", str(path))


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePython:
    return lambda program: in_place_of_python(program, tmp_path, monkeypatch)


def test_a_fatal_error_is_a_message(python):
    python("print('LLVM ERROR: no such instruction\\n', file=sys.stderr, flush=True); os.abort()")
    expected = "the compiler ended its process, SIGABRT: LLVM ERROR: no such instruction"
    assert compile_in_child(deployment(TINY, "v5e")) == Refusal("compiler", expected)


def test_so_is_an_exit(python):
    python("sys.exit(3)")
    assert (
        compile_in_child(deployment(TINY, "v5e")).message == "the compiler ended its process, exit status 3: no message"
    )


def test_the_job_and_its_devices_reach_the_process(python):
    planned = deployment(TINY, "cpu", mesh="2x1x2")
    python(
        "from jaxvllm.planner.compiler import Refusal, to_json\n"
        "from jaxvllm.planner.deployment import Deployment\n"
        "deployment = Deployment.from_json(sys.stdin.read())\n"
        "environment = [os.environ[name] for name in ('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES')]\n"
        "about = [str(deployment.mesh), *environment, *sys.argv[1:]]\n"
        "print(to_json(Refusal('usage', str(about))))"
    )
    expected = "['2x1x2', 'cpu', '4', '-m', 'jaxvllm.planner.compile_worker']"
    assert compile_in_child(planned) == Refusal("usage", expected)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    # 7 query heads over 1 KV head, on two devices.
    planned = deployment(TINY, "cpu", mesh="1x2", max_num_seqs=4, max_num_batched_tokens=16)
    program = f"sys.path.insert(0, {str(ROOT)!r})\n{QUICKLY}\nfrom jaxvllm.planner.compile_worker import main\nmain()"
    with pytest.MonkeyPatch.context() as patch:
        in_place_of_python(program, tmp_path_factory.mktemp("quickly"), patch)
        found = compile_in_child(planned)
    assert isinstance(found, Findings), found
    return found


def test_findings_survive_the_pipe(findings):
    assert from_json(to_json(findings)) == findings
    refusal = Refusal("memory", "Ran out of memory")
    assert from_json(to_json(refusal)) == refusal


def test_a_step_has_the_collectives_of_its_design(findings):
    """Two all-reduces a layer and one for the embedding, of activations; the best of each device for greedy rows."""
    for step in (findings.largest, findings.decode):
        always = [each for each in step.collectives if not each.conditional]
        # XLA:CPU adds up in float32, which these are.
        assert [(each.kind, each.count, each.num_bytes) for each in always] == [
            ("all-reduce", 2 * 2 + 1, step.num_tokens * 56 * 4),
            ("all-gather", 1, 2 * 2 * step.num_rows * 4),
        ]
        sampling = {each.kind: each for each in step.collectives if each.conditional}
        # Of 132 columns, one to make them divide; once to draw, once for log-probabilities.
        assert sampling["all-to-all"].num_bytes * sampling["all-to-all"].count == 2 * step.num_rows * 132 // 2 * 4
        assert step.step_bytes >= step.temp_bytes > 0
        # The pool of an engine: 4 requests of 64 tokens, and the trash page.
        assert step.argument_bytes > findings.pool_bytes == 17 * deployment(TINY, "cpu", mesh="1x2").page_bytes
    assert (findings.largest.num_tokens, findings.decode.num_tokens) == (16, 4)
    assert findings.versions["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("17 devices: between 1 and 16 can be compiled for"), "usage"),
        (NotImplementedError("no kernels"), "usage"),
        (RuntimeError("libtpu is not installed"), "usage"),
        (UnreadableHlo("this is no HLO text"), "compiler"),
        (jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed\nwith a long story"), "compiler"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error.\nRan out of"), "memory"),
    ],
)
def test_errors_become_refusals_of_one_line(error, kind, monkeypatch):
    def fail(deployment):
        raise error

    monkeypatch.setattr(compile_worker, "compile_steps", fail)
    refusal = compile_worker._outcome(deployment(TINY, "v5e"))
    assert refusal == Refusal(kind, str(error).splitlines()[0])


def test_too_many_devices_are_refused_before_anything_compiles():
    refusal = compile_worker._outcome(replace(deployment(TINY, "v5e"), size=32))
    assert refusal == Refusal("usage", "32 devices: between 1 and 16 can be compiled for")
