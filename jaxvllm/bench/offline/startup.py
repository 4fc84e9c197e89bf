"""Measures starts of an engine, each in a process of its own, like `vllm bench startup`.

A cold start has an empty cache of compiled programs. A warm one has the cache that starts before it left.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxvllm.bench.offline.latency import percentiles
from jaxvllm.ranges import CountOrZero, check_ranges

# What a start says when it gets there, and what vLLM calls the time until then. vLLM has only the first.
PHASES = {"startup": "startup time", "first_token": "time to first token", "compiled": "time to the last program"}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
WIDTH = 60


@dataclass(frozen=True)
class StartupOptions:
    """The number of starts. Names and defaults are vLLM's."""

    num_iters_cold: CountOrZero = 3  # starts without compiled programs
    num_iters_warmup: CountOrZero = 1  # starts that fill the cache of compiled programs, which are not timed
    num_iters_warm: CountOrZero = 3  # starts with that cache

    def __post_init__(self) -> None:
        check_ranges(self)


# The seconds from the start of a process until each of PHASES.
type Start = Mapping[str, float]


@dataclass(frozen=True)
class Startups:
    """The starts that were timed."""

    cold: Sequence[Start]
    warm: Sequence[Start]

    def lines(self) -> list[str]:
        """Returns vLLM's lines."""
        lines = ["=" * WIDTH, "STARTUP TIME BENCHMARK RESULTS", "=" * WIDTH]
        for kind, starts in self._kinds():
            lines += ["", f"{kind.upper()} STARTUP:"]
            lines += [f"Avg {name}: {_mean(starts, phase):.2f} seconds" for phase, name in PHASES.items()]
            for phase, name in PHASES.items():
                lines.append(f"{name.capitalize()} percentiles:")
                shares = percentiles(_seconds(starts, phase))
                lines += [f"  {share}%: {value:.2f} seconds" for share, value in shares.items()]
        return [*lines, "=" * WIDTH]

    def record(self) -> dict[str, Any]:
        """Returns the figures under vLLM's keys, and those of the same form for the other phases."""
        result: dict[str, Any] = {}
        for kind, starts in self._kinds():
            for phase in PHASES:
                seconds = _seconds(starts, phase)
                result |= {
                    f"avg_{kind}_{phase}_time": _mean(starts, phase),
                    f"{kind}_{phase}_times": list(seconds),
                    f"{kind}_{phase}_percentiles": {str(k): value for k, value in percentiles(seconds).items()},
                }
        return result

    def _kinds(self) -> Iterator[tuple[str, Sequence[Start]]]:
        yield from ((kind, starts) for kind, starts in (("cold", self.cold), ("warm", self.warm)) if starts)


def measure_startups(options: StartupOptions, engine: Mapping[str, Any], shows_progress: bool = True) -> Startups:
    """Starts engines with the options `engine` of an `EngineConfig`, one after the other.

    Raises ValueError when one does not start. What it had to say is on standard error.
    """

    def starts(count: int, title: str, cache: Path | None) -> list[Start]:
        bar = tqdm(range(count), desc=title, disable=not shows_progress)
        return [_start(engine, cache) for _ in bar]

    cold = starts(options.num_iters_cold, "Cold startup iterations", None)
    with tempfile.TemporaryDirectory() as cache:
        starts(options.num_iters_warmup, "Warmup iterations", Path(cache))
        warm = starts(options.num_iters_warm, "Warm startup iterations", Path(cache))
    return Startups(cold, warm)


def _start(engine: Mapping[str, Any], cache: Path | None) -> Start:
    """Starts one engine with this cache, or with an empty one, and waits for its end."""
    with tempfile.TemporaryDirectory() as empty:
        options = dict(engine) | {"compilation_cache": str(cache or empty)}
        command = [sys.executable, "-m", "jaxvllm.bench.offline.startup", json.dumps(options)]
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reached = {line.strip(): time.monotonic() - begin for line in process.stdout}
    if missing := [phase for phase in PHASES if phase not in reached]:
        raise ValueError(f"an engine did not get to {missing[0]!r}, and ended with status {process.returncode}")
    return {phase: reached[phase] for phase in PHASES}


def _child(options: dict[str, Any]) -> None:
    """Starts an engine in this process, and prints each of PHASES as it gets there."""
    from jaxvllm import LLM, SamplingParams
    from jaxvllm.config import EngineConfig

    values = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    with LLM.from_config(EngineConfig.from_options(**values)) as llm:
        print("startup", flush=True)
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        print("first_token", flush=True)
        llm.wait_until_compiled()
        print("compiled", flush=True)


def _seconds(starts: Sequence[Start], phase: str) -> tuple[float, ...]:
    return tuple(start[phase] for start in starts)


def _mean(starts: Sequence[Start], phase: str) -> float:
    return float(np.mean(_seconds(starts, phase)))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
