"""Compiles every kernel and the engine's step for TPUs and GPUs that are not here, and reports their needs: `make aot`.

Each chip has two processes, one after the other, in the environment .aot, which has the compilers: one for kernels
alone, and one for steps. A compiler's fatal error ends its process, and fails the current program. A new process goes
on with the next.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

from benchmarks.result_files import ROOT, machine, write_record
from pallas_kernels.chips import CHIPS
from tools.aot_outcome import HEADER, PROCESSES, Kind, Outcome
from tools.kernel_resources import dump_environment

AOT = ROOT / ".aot"
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
# The time that a program may take, from tracing to the end of its compilation. A step with an EAGLE-3 head took 94 s
# for v6e on two cores that ran the tests, too.
MAX_SECONDS = 150.0
# The time for a worker's imports, on a machine that is busy with other things.
START_SECONDS = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.aot", description=__doc__)
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=f"some of {', '.join(CHIPS)}; none: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many chips at once (%(default)s)")
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    about = machine()
    chips = arguments.chips or list(CHIPS)
    print(HEADER, flush=True)
    with ThreadPoolExecutor(arguments.jobs) as threads:
        outcomes = dict(zip(chips, threads.map(compile_chip, chips), strict=True))
    every = [outcome for results in outcomes.values() for outcome in results]
    counts = {status: sum(outcome.status == status for outcome in every) for status in ("ok", "refused", "failed")}
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()) + f"; {_minutes(every)}")
    if arguments.record:
        found = {chip: [asdict(outcome) for outcome in results] for chip, results in outcomes.items()}
        print(write_record("aot", about, {"compilers": compiler_versions(), "chips": found}))
    sys.exit(0 if counts["ok"] == len(every) > 0 else 1)


def compile_chip(chip: str) -> list[Outcome]:
    """Compiles all programs for `chip`, and prints a line of the table for each."""
    outcomes = []
    for outcome in chain.from_iterable(compile_for(chip, kinds) for kinds in PROCESSES):
        print(outcome.row(chip), flush=True)
        outcomes.append(outcome)
    print(f"{chip}: {len(outcomes)} programs, {_minutes(outcomes)}", flush=True)
    return outcomes


def _minutes(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(outcome.cpu_seconds for outcome in outcomes) / 60:.1f} minutes of CPU, beside the starts of processes"


def compiler_versions() -> dict[str, str]:
    """Returns the versions of the packages in .aot that decide the results."""
    paths = [str(path) for path in AOT.glob("lib/python*/site-packages")]
    return {package.name: package.version for package in distributions(path=paths) if package.name in COMPILERS}


def compile_for(
    chip: str, kinds: Sequence[Kind], programs: Sequence[str] = (), python: Path = AOT / "bin" / "python"
) -> Iterator[Outcome]:
    """Compiles these programs (none: all) of some kinds for `chip`, in order. Raises RuntimeError if no worker starts.

    All of them are compiled in one process, unless it dies. The resources of kernels are told where no kind is "step".
    """
    left = tuple(programs)
    while True:
        with closing(Worker(python, chip, kinds, left)) as worker:
            left = worker.programs
            while left and worker.is_alive:
                name, left = left[0], left[1:]
                yield worker.outcome(name)
        if not left:
            return


class Worker:
    """A process that compiles programs for one chip, one after another."""

    def __init__(self, python: Path, chip: str, kinds: Sequence[Kind], programs: Sequence[str]):
        self.is_alive = True
        self._scratch = tempfile.TemporaryDirectory(prefix="jaxvllm-aot-")
        dumps = Path(self._scratch.name) / "dumps"
        self._stderr = Path(self._scratch.name) / "stderr"
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "tools.aot_worker", chip, ",".join(kinds), dumps, *programs],
                cwd=ROOT,
                # Dumping would double the time of a step, and its kernels are measured alone already.
                env=os.environ | {"JAX_PLATFORMS": "cpu"} | (dump_environment(dumps) if "step" not in kinds else {}),
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,  # because select does not see the contents of a buffer
            )
        line = self._read_line(START_SECONDS)
        if not line:
            message = f"no worker for {chip} starts: {self._last_words()}"
            self.close()
            raise RuntimeError(message)
        self.programs: tuple[str, ...] = tuple(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipe
        self._scratch.cleanup()

    def outcome(self, program: str) -> Outcome:
        """Returns the outcome of the next program, which is `program`. The worker may not survive it."""
        start = time.monotonic()
        line = self._read_line(MAX_SECONDS)
        if line:
            return Outcome.from_json(line)
        self.is_alive = False
        if line is None:
            return Outcome(program, "failed", MAX_SECONDS, f"not compiled after {MAX_SECONDS:.0f} s")
        code = self._process.wait()
        if code == -signal.SIGINT:  # typed by a user, who does not want the next program either
            raise KeyboardInterrupt
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        message = f"the compiler ended its process, {how}: {self._last_words()}"
        return Outcome(program, "failed", time.monotonic() - start, message)

    def _read_line(self, seconds: float) -> str | None:
        """Reads the worker's next line. It is empty when the worker has ended, and None when none came in time."""
        stdout = self._process.stdout
        assert stdout is not None
        return stdout.readline().decode() if select.select([stdout], [], [], seconds)[0] else None

    def _last_words(self) -> str:
        """Returns the last line with text that the worker and the compilers printed."""
        lines = [line.strip() for line in self._stderr.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "no message")


if __name__ == "__main__":
    main()
