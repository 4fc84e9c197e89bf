"""Measures how long one batch of requests takes, like `vllm bench latency`."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.offline.drafts import drafts_between
from jaxvllm.bench.offline.padding import Padding
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.ranges import Count, CountOrZero, Tokens, check_ranges

if TYPE_CHECKING:
    from jaxvllm.engine.llm import LLM

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyOptions:
    """One batch, and how often it runs. Names and defaults are vLLM's."""

    input_len: Tokens = 32  # tokens of each prompt, all random
    output_len: Tokens = 128  # tokens of each answer; the end of text is ignored
    batch_size: Count = 8  # requests of the batch, all there from the start
    n: Count = 1  # completions of each request
    use_beam_search: bool = False  # search for the best n sequences instead of drawing n
    num_iters_warmup: CountOrZero = 10  # runs before those that are timed
    num_iters: Count = 30  # runs that are timed
    disable_detokenize: bool = False  # make no text of the tokens

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Latencies:
    """The seconds of each timed run, and the padding and the drafts of all of them together."""

    seconds: tuple[float, ...]
    padding: Padding
    drafts: DraftTotals

    @property
    def percentiles(self) -> dict[int, float]:
        return percentiles(self.seconds)

    def lines(self) -> list[str]:
        """Returns vLLM's lines, one about padding, and one about drafts where there were any."""
        return [
            f"Avg latency: {np.mean(self.seconds):.6f} seconds",
            f"Std latency: {np.std(self.seconds):.6f} seconds",
            *(f"{share}% percentile latency: {value:.6f} seconds" for share, value in self.percentiles.items()),
            self.padding.line(),
            *([self.drafts.line()] if self.drafts.drafts else []),
        ]

    def record(self) -> dict[str, Any]:
        """Returns the figures under vLLM's keys, and those of padding and of drafts."""
        return {
            "avg_latency": float(np.mean(self.seconds)),
            "std_latency": float(np.std(self.seconds)),
            "latencies": list(self.seconds),
            "percentiles": {str(share): value for share, value in self.percentiles.items()},
            "padding": self.padding.record(),
            **(self.drafts.record() if self.drafts.drafts else {}),
        }


def percentiles(seconds: tuple[float, ...]) -> dict[int, float]:
    """Returns vLLM's percentiles of `seconds`."""
    values = np.percentile(np.asarray(seconds), PERCENTAGES)
    return {share: float(value) for share, value in zip(PERCENTAGES, values, strict=True)}


class LatencyBenchmark:
    """Runs one batch on an engine. All runs have the same prompts, which a prefix cache would notice: turn it off."""

    def __init__(self, llm: "LLM", options: LatencyOptions, seed: int, shows_progress: bool = True):
        """Draws the prompts. Raises ValueError when the model does not take requests of this length."""
        engine = llm.engine
        if options.input_len + options.output_len > engine.max_model_len:
            raise ValueError(
                f"--input-len {options.input_len} and --output-len {options.output_len} exceed the "
                f"{engine.max_model_len} tokens that the model takes: give lengths that fit"
            )
        ids = np.random.default_rng(seed).integers(engine.vocab_size, size=(options.batch_size, options.input_len))
        self._prompts: list[Any] = [{"prompt_token_ids": row} for row in ids.tolist()]
        self._llm = llm
        self._options = options
        self._shows_progress = shows_progress

    def run(self) -> Latencies:
        """Warms up, and times the runs after that. Nothing compiles while they run."""
        self._llm.wait_until_compiled()
        self._repeat(self._options.num_iters_warmup, "Warmup iterations")
        before = self._llm.engine.stats()
        seconds = self._repeat(self._options.num_iters, "Bench iterations")
        after = self._llm.engine.stats()
        return Latencies(seconds, Padding.between(before, after), drafts_between(before, after))

    def profile(self, traced: Callable[[], AbstractContextManager[None]]) -> None:
        """Warms up, and runs the batch once inside of `traced()`."""
        self._llm.wait_until_compiled()
        self._repeat(self._options.num_iters_warmup, "Warmup iterations")
        with traced():
            self._complete()

    def _repeat(self, count: int, title: str) -> tuple[float, ...]:
        return tuple(self._complete() for _ in tqdm(range(count), desc=title, disable=not self._shows_progress))

    def _complete(self) -> float:
        """Completes the batch once, and returns the seconds that it took."""
        options, llm = self._options, self._llm
        start = time.perf_counter()
        if options.use_beam_search:
            llm.beam_search(
                self._prompts,
                BeamSearchParams(beam_width=options.n, max_tokens=options.output_len, ignore_eos=True),
            )
        else:
            params = SamplingParams(
                n=options.n,
                temperature=1.0,
                ignore_eos=True,
                max_tokens=options.output_len,
                detokenize=not options.disable_detokenize,
            )
            llm.generate(self._prompts, params, use_tqdm=False)
        return time.perf_counter() - start
