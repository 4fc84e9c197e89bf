"""Measures our attention and its XLA reference, case by case."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jaxvllm.bench.kernels.ceilings import Ceilings, measure_ceilings
from jaxvllm.bench.kernels.contender import LayerOutcome
from jaxvllm.bench.kernels.counts import Work
from jaxvllm.bench.kernels.device import describe
from jaxvllm.bench.kernels.paged import OurAttention, PagedContender
from jaxvllm.ranges import Range, check_ranges
from pallas_kernels.backend import REFERENCE, Backend, BackendName, multiplies_bf16
from pallas_kernels.ragged_paged_attention import backend_for
from pallas_kernels.ragged_paged_attention.cases import CASES, SERVING, RaggedCase

# The heads of an 8B model. All serving cases together take a quarter of an hour.
DEFAULT_CASES = "-q32-d128$"


@dataclass(frozen=True)
class KernelOptions:
    """The cases to measure, and the way to measure them."""

    cases: str = DEFAULT_CASES  # a regular expression that finds the names of cases
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, else 16 bits
    attention_backend: BackendName = "auto"  # auto: the device's kernels; interpret: run slowly on the CPU
    minutes: Annotated[float, Range(0, 10_000)] = 5.0  # start no further case after so many

    def __post_init__(self) -> None:
        check_ranges(self)
        try:
            found = self.chosen
        except re.error as error:
            raise ValueError(f"--cases {self.cases} is no regular expression: {error}") from None
        if not found:
            raise ValueError(f"--cases {self.cases} is found in no case's name, such as {SERVING[0].name}")

    @property
    def chosen(self) -> list[RaggedCase]:
        return [case for case in (*SERVING, *CASES) if re.search(self.cases, case.name)]


@dataclass(frozen=True)
class KernelResult:
    """The outcomes of one case, ours first. A call counts as a whole, the write of new keys and values included."""

    case: RaggedCase
    work: Work
    ceilings: Ceilings
    outcomes: dict[str, LayerOutcome]

    def line(self) -> str:
        """Returns one line: the error and the time of each contender, and what the device could do at best."""
        told = "; ".join(f"{name}: {self._told(outcome)}" for name, outcome in self.outcomes.items())
        return f"{self.case.name}: {told}; at best {self.ceilings.seconds(self.work) * 1e6:.1f} us"

    def _told(self, outcome: LayerOutcome) -> str:
        error = "no error known" if outcome.error is None else f"error {outcome.error:.1e}"
        if outcome.timing is None:
            return f"{error}, not timed: {outcome.problem}"
        seconds = outcome.timing.median
        share, ceiling = self.ceilings.seconds(self.work) / seconds, self.ceilings.binding(self.work)
        return f"{error}, {seconds * 1e6:.1f} us a layer ({share:.0%} of the {ceiling} ceiling)"

    def record(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        least = self.ceilings.seconds(self.work)
        contenders = {
            name: {
                "error": outcome.error,
                "problem": outcome.problem,
                "seconds_a_layer": None if outcome.timing is None else list(outcome.timing.samples),
                "share_of_ceiling": None if outcome.timing is None else least / outcome.timing.median,
            }
            for name, outcome in self.outcomes.items()
        }
        work = {"bytes": self.work.bytes, "flops": self.work.flops, "ceiling": self.ceilings.binding(self.work)}
        return {"case": self.case.name, **work, "least_seconds": least, "contenders": contenders}


@dataclass
class KernelBenchmark:
    """Measures the ceilings of this process's first device, and then one case after the other."""

    options: KernelOptions
    device: jax.Device = field(default_factory=lambda: jax.devices()[0])

    def __post_init__(self) -> None:
        in_16_bits = "bfloat16" if multiplies_bf16(self.device) else "float16"
        auto = "float32" if self.device.platform == "cpu" else in_16_bits
        self.dtype = jnp.dtype(auto if self.options.dtype == "auto" else self.options.dtype)
        self.ceilings = measure_ceilings(self.device, self.dtype)

    def heading(self) -> str:
        copy, matmul = self.ceilings.copy / 1e9, self.ceilings.matmul / 1e12
        kind = self.device.device_kind
        return f"{kind}: copies {copy:.4g} GB/s, multiplies {self.dtype.name} at {matmul:.4g} TFLOP/s"

    def run(self) -> Iterator[KernelResult]:
        """Yields each case when it is measured, until the minutes are over. An exception is an outcome, too."""
        end = time.monotonic() + 60 * self.options.minutes
        backend = Backend.of_device(self.options.attention_backend, self.device, self.dtype)
        for case in self.options.chosen:
            if time.monotonic() > end:
                return
            outcomes = {one.name: self._outcome(one, case) for one in self._contenders(case, backend)}
            yield KernelResult(case, Work.of(case, self.dtype), self.ceilings, outcomes)

    def record(self, results: Sequence[KernelResult]) -> dict[str, Any]:
        """Returns everything for JSON, and the cases for which there was no time."""
        ceilings = {
            "copy_bytes_per_second": self.ceilings.copy,
            "matmul_flops_per_second": self.ceilings.matmul,
        }
        left = [case.name for case in self.options.chosen[len(results) :]]
        about = {"dtype": self.dtype.name, "about_device": describe(self.device), "ceilings": ceilings}
        return about | {"cases_not_measured": left, "results": [result.record() for result in results]}

    def _contenders(self, case: RaggedCase, backend: Backend) -> list[PagedContender]:
        backend = backend_for(case.head_size, backend, case.latent_size, case.num_heads // case.num_kv_heads)
        reference = PagedContender("reference", OurAttention(REFERENCE), REFERENCE, self.device)
        if backend == REFERENCE:
            return [reference]
        return [PagedContender(f"ours ({backend.kind})", OurAttention(backend), backend, self.device), reference]

    def _outcome(self, contender: PagedContender, case: RaggedCase) -> LayerOutcome:
        try:
            return contender.run(case, self.dtype)
        except Exception as error:  # a case that does not fit or compile must not hide the others
            return LayerOutcome.without(f"{type(error).__name__}: {str(error).strip().partition('\n')[0][:300]}")
