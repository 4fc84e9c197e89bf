"""One benchmark: what is asked, how fast, of whom; and running it."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxvllm.bench.limits import allow_connections
from jaxvllm.bench.load import Target, run_load
from jaxvllm.bench.metrics import Goodput, measure
from jaxvllm.bench.readiness import patiently
from jaxvllm.bench.report import Run
from jaxvllm.bench.samples import Dataset, Sample
from jaxvllm.bench.traffic import Traffic
from jaxvllm.bench.vocabulary import Vocabulary
from jaxvllm.client.api import Api

# Beyond this share of a core, chunks wait for this program and their times are partly its own. A run shorter than a
# second is mostly its own beginning, and tells little either way.
BUSY = 0.7
SHORT = 1.0


@dataclass(frozen=True)
class Benchmark:
    """Everything that a run depends on: the same value and the same server give the same requests at the same times."""

    target: Target
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

    def run(self, api: Api) -> Run:
        """Tries one request, then sends all. ServerError when the trial fails; later failures are counted."""
        samples_rng, arrivals_rng = np.random.default_rng(self.seed).spawn(2)
        samples = self.dataset.sample(self.traffic.num_prompts, self.vocabulary, self.dataset_path, samples_rng)
        patiently(lambda: self._try(api, samples[0].stranger), self.patience)
        allow_connections(min(len(samples), self.traffic.max_concurrency or len(samples)))
        arrivals = self.traffic.arrivals(arrivals_rng)
        with tqdm(total=len(samples), unit="req", disable=None if self.shows_progress else True) as bar:
            load = run_load(self.target, samples, arrivals, self.traffic.max_concurrency, bar.update)
            outcome = asyncio.run(load)
        run = Run(self.traffic, outcome, measure(outcome, self.percentiles, self.goodput), self.shown)
        self._tell_troubles(run)
        return run

    def _try(self, api: Api, sample: Sample) -> None:
        for _ in api.stream(self.target.endpoint, self.target.body(sample)):
            pass

    def _tell_troubles(self, run: Run) -> None:
        errors = [record.error for record in run.outcome.records if record.error]
        for error in errors[:10]:
            print(f"a request failed: {error}", file=sys.stderr)
        if len(errors) > 10:
            print(f"... and {len(errors) - 10} more", file=sys.stderr)
        share = run.outcome.cpu_seconds / run.outcome.duration
        if share > BUSY and run.outcome.duration > SHORT:
            print(
                f"this program took {share:.0%} of a core, so latencies are partly its own: send less at a time",
                file=sys.stderr,
            )
