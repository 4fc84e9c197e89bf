"""`Benchmark`: one benchmark with its requests, their times and the server, and the code that runs it."""

import asyncio
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.load import RequestTarget, run_load
from jaxvllm.bench.report import BenchRun
from jaxvllm.bench.samples import BenchSample, Dataset
from jaxvllm.bench.summary import Goodput, measure
from jaxvllm.bench.traffic import Traffic
from jaxvllm.bench.vocabulary import Vocabulary
from jaxvllm.client.api import Api
from jaxvllm.client.errors import ServerError

# Above this share of a core, chunks wait for this program, so that it adds to the measured times. A run shorter than a
# second is mostly startup, and its share says little.
BUSY = 0.7
SHORT = 1.0
PAUSE = 1.0  # seconds between two tries to reach a server that is still starting
SETTLE = 1.5  # seconds: our server tells its engine's counts once a second
SPARE_FILES = 64  # open files that are not connections


@dataclass(frozen=True)
class Benchmark:
    """All settings of a run. The same value with the same server gives the same requests at the same times."""

    target: RequestTarget
    traffic: Traffic
    dataset: Dataset
    dataset_path: Path | None
    vocabulary: Vocabulary
    seed: int
    shown: Sequence[str]  # names of latencies
    percentiles: Sequence[float]
    goodput: Goodput | None
    patience: float  # seconds to wait for a server that is still starting
    shows_progress: bool

    def run(self, api: Api) -> BenchRun:
        """Tries one request, then sends all. Raises ServerError when the trial fails; later failures are counted."""
        samples_rng, arrivals_rng = np.random.default_rng(self.seed).spawn(2)
        samples = self.dataset.sample(self.traffic.num_prompts, self.vocabulary, self.dataset_path, samples_rng)
        patiently(lambda: self._try(api, samples[0].stranger), self.patience)
        allow_connections(min(len(samples), self.traffic.max_concurrency or len(samples)))
        before = DraftTotals.read(api.metrics())
        arrivals = self.traffic.arrivals(arrivals_rng)
        with tqdm(total=len(samples), unit="req", disable=None if self.shows_progress else True) as bar:
            load = run_load(self.target, samples, arrivals, self.traffic.max_concurrency, bar.update)
            outcome = asyncio.run(load)
        if before.accepted_per_pos:  # the server speculates
            time.sleep(SETTLE)
        drafts = DraftTotals.read(api.metrics()).since(before)
        run = BenchRun(self.traffic, outcome, measure(outcome, self.percentiles, self.goodput), self.shown, drafts)
        self._tell_troubles(run)
        return run

    def _try(self, api: Api, sample: BenchSample) -> None:
        for _ in api.stream(self.target.endpoint, self.target.body(sample)):
            pass

    def _tell_troubles(self, run: BenchRun) -> None:
        errors = [record.error for record in run.outcome.records if record.error]
        for error in errors[:10]:
            print(f"a request failed: {error}", file=sys.stderr)
        if len(errors) > 10:
            print(f"... and {len(errors) - 10} more", file=sys.stderr)
        share = run.outcome.cpu_seconds / run.outcome.duration
        if share > BUSY and run.outcome.duration > SHORT:
            print(
                f"this program took {share:.0%} of a core, so latencies are partly its own: send fewer at a time",
                file=sys.stderr,
            )


def patiently[T](call: Callable[[], T], patience: float) -> T:
    """Returns `call()`, and repeats it for `patience` seconds while no server answers or it is not ready (503).

    Raises the ServerError of the last try. Any other failure is raised at once.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except ServerError as error:
            if error.status not in (None, 503) or time.monotonic() + PAUSE > deadline:
                raise
        time.sleep(PAUSE)


def allow_connections(count: int) -> None:
    """Raises the limit of open files, usually 1024, for `count` connections. Raises ValueError if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{count} connections at a time exceed the {hard} files that may be open: give --max-concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
