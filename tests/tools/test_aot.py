"""The driver of `make aot` goes on after a worker's death, and says what came of every program."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pallas_kernels.chips import CHIPS, GpuChip
from tools import aot
from tools.aot_outcome import HEADER, Outcome
from tools.aot_programs import programs
from tools.kernel_resources import STDOUT, KernelResources, read_resources

type MakeWorker = Callable[[str], Path]

ALL = ("a/1", "a/2", "a/3")


@pytest.fixture
def make_worker(tmp_path: Path) -> MakeWorker:
    """An interpreter in whose place a program runs that treats the programs of a chip as `compile` says."""

    def make(compile: str) -> Path:
        path = tmp_path / "python"
        path.write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys, time\n"
            f"names = sys.argv[6:] or {list(ALL)}\n"
            "print(json.dumps(names), flush=True)\n"
            "def ok(name, **fields):\n"
            "    fields = dict(program=name, status='ok', seconds=1.0, kernels=[]) | fields\n"
            "    print(json.dumps(fields), flush=True)\n"
            "for name in names:\n"
            f"    {compile}\n"
        )
        path.chmod(0o755)
        return path

    return make


def statuses(python: Path, *programs: str) -> list[tuple[str, str]]:
    return [(outcome.program, outcome.status) for outcome in aot.compile_for("v5e", ("attention",), programs, python)]


def test_all_programs_in_order(make_worker: MakeWorker) -> None:
    python = make_worker("ok(name)")
    assert statuses(python) == [(name, "ok") for name in ALL]
    assert statuses(python, "a/3", "a/1") == [("a/3", "ok"), ("a/1", "ok")]


def test_a_death_fails_one_program(make_worker: MakeWorker) -> None:
    python = make_worker("ok(name) if name != 'a/2' else (print('LLVM ERROR: no', file=sys.stderr), os.abort())")
    outcomes = list(aot.compile_for("v5e", ("attention",), (), python))
    assert [outcome.status for outcome in outcomes] == ["ok", "failed", "ok"]
    assert outcomes[1].message == "the compiler ended its process, SIGABRT: LLVM ERROR: no"


def test_a_death_at_the_end(make_worker: MakeWorker) -> None:
    assert statuses(make_worker("ok(name) if name != 'a/3' else sys.exit(3)"))[-1] == ("a/3", "failed")


def test_what_takes_too_long_is_ended(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "MAX_SECONDS", 0.5)
    outcomes = list(
        aot.compile_for("v5e", ("attention",), (), make_worker("ok(name) if name != 'a/1' else time.sleep(99)"))
    )
    assert [outcome.status for outcome in outcomes] == ["failed", "ok", "ok"]
    assert outcomes[0].message == "not compiled after 0 s"


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nraise SystemExit('no compiler for v5e')\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="no worker for v5e starts: no compiler for v5e"):
        statuses(python)


OUTCOME = Outcome(
    "attention/some-case/tpu",
    "ok",
    2.34,
    "",
    4.56,
    3 * 2**20,
    2**30,
    5 * 2**19,
    (KernelResources("k", vmem_bytes=6 * 2**20, spill_bytes=0),),
)


def test_outcomes_survive_the_pipe() -> None:
    assert Outcome.from_json(OUTCOME.to_json()) == OUTCOME


def test_the_table() -> None:
    cells = ["v5e", "attention/some-case/tpu", "ok", "2.3", "4.6", "3.0", "1024.0", "2.5", "6144", "-", "-", "0"]
    assert OUTCOME.row("v5e").split() == cells
    assert len(OUTCOME.row("v5e")) == max(map(len, HEADER.splitlines()))


@pytest.mark.parametrize(
    ("statuses", "code"), [(["ok", "ok"], 0), (["ok", "refused"], 1), (["ok", "failed"], 1), (["refused"], 1), ([], 1)]
)
def test_the_exit_status(
    statuses: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {("step",): [Outcome("p", status, 1.0, cpu_seconds=30.0) for status in statuses]}
    monkeypatch.setattr(aot, "compile_for", lambda chip, kinds: iter(outcomes.get(kinds, ())))
    monkeypatch.setattr(sys, "argv", ["aot", "v5e"])
    with pytest.raises(SystemExit) as exit:
        aot.main()
    assert exit.value.code == code
    printed = capsys.readouterr().out
    assert f"{statuses.count('ok')} ok, {statuses.count('refused')} refused" in printed
    assert f"v5e: {len(statuses)} programs, {len(statuses) / 2} minutes of CPU" in printed


def printed(*kernels: tuple[int, str, int, int]) -> str:
    """Returns what a process prints that lowers kernels and compiles them: shared memory, name, registers, spills."""
    lowered = "".join(f"Resources(smem_scratch_bytes={shared}, tmem_scratch_cols=0)\n" for shared, *_ in kernels)
    return lowered + "".join(
        f"ptxas info    : Compiling entry function '{name}_mosaic_gpu_kernel' for 'sm_90a'\n"
        f"    0 bytes stack frame, {spills} bytes spill stores, 8 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers\n"
        for _, name, registers, spills in kernels
    )


def test_resources_of_gpu_kernels(tmp_path: Path) -> None:
    (tmp_path / STDOUT).write_text(printed((65536, "attend", 134, 12), (0, "merge", 63, 0)))
    spilling, other = read_resources(tmp_path, "")
    assert spilling == KernelResources("attend_0", None, 65536, registers=134, spill_bytes=12, ptx_target="sm_90a")
    assert other == KernelResources("merge_1", None, 0, registers=63, spill_bytes=0, ptx_target="sm_90a")
    assert spilling.spills_on_gpu and not other.spills_on_gpu


def test_shared_memory_is_unknown_where_a_kernel_was_lowered_and_not_compiled(tmp_path: Path) -> None:
    lowered = "Resources(smem_scratch_bytes=4096, tmem_scratch_cols=0)\n"
    (tmp_path / STDOUT).write_text(lowered + printed((65536, "attend", 134, 0)))
    [kernel] = read_resources(tmp_path, "")
    assert kernel.shared_memory_bytes is None and kernel.registers == 134


def test_resources_of_a_tpu_kernel(tmp_path: Path) -> None:
    buffers = '[{"size": 100, "tag": "scratch operand"}, {"size": 28, "tag": "SPILL"}]'
    kernel = f'{{"blocks": [{{"allocations": {buffers}}}], "total_size": 128}}'
    (tmp_path / "12-TLP-00-vmem_report.html").write_text(
        f'<script>const DATA ={{"hlo_breakdowns": {{"attend.3": {kernel}, "fusion.1": {kernel}}}}};</script>'
    )
    hlo = (
        '  %attend.3 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"\n  %fusion.1 = f32[8] fusion(%x)\n'
    )
    assert read_resources(tmp_path, hlo) == (KernelResources("attend.3", vmem_bytes=128, spill_bytes=28),)


def test_every_chip_compiles_a_batch_and_a_prompt_of_a_server() -> None:
    for chip in CHIPS.values():
        found = {program.name: program for program in programs(chip, "attention")}
        for case in ("decode-64x4096-heads-int8", "prefill-2048-heads-int8"):
            program = found[f"attention/{case}/{'gpu' if isinstance(chip, GpuChip) else 'tpu'}"]
            # docs/kernels.md says what they spill on a B200. Those of TPUs report no registers.
            assert program.may_spill == (chip.name == "b200" or not isinstance(chip, GpuChip)), chip.name
