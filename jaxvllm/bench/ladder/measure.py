"""Measures the rungs, all with the same requests, and refuses figures of a rung whose tokens are other ones."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Annotated

import jax

from jaxvllm.bench.ladder.drivers import Apart, Driver, Recomputing, Serving
from jaxvllm.bench.ladder.figures import MeasuredRung
from jaxvllm.bench.ladder.run import RungRun
from jaxvllm.bench.ladder.rung import Rung, Sizes, Way
from jaxvllm.bench.ladder.workload import TimedChats
from jaxvllm.config import EngineConfig
from jaxvllm.core.page_pool import pages_for
from jaxvllm.engine.burst_pace import SERVING_SECONDS
from jaxvllm.engine.engine import Engine
from jaxvllm.ranges import Count, Range, Seed, check_ranges


class DifferentTokens(Exception):
    """A rung has given other tokens than the first one."""


@dataclass(frozen=True)
class LadderOptions:
    """The load, and how often it is measured."""

    requests: Count = 24  # half of them are there from the start
    arrivals: Annotated[float, Range(0, 3600)] = 0.25  # seconds within which the other half comes
    rounds: Count = 4  # runs of each rung that count; without a KV cache there is one
    seed: Seed = 0  # of the requests, and of what is drawn in each of them

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Ladder:
    """The rungs that were measured, from the lowest to the highest, and the load."""

    options: LadderOptions
    device: str  # where it was measured
    num_prompt_tokens: int
    num_output_tokens: int
    rungs: tuple[MeasuredRung, ...]
    start_seconds: float  # until all engines were ready
    seconds: float  # in all


class LadderEngines:
    """The engines of a ladder. Rungs with the same config share one."""

    def __init__(self, stack: ExitStack) -> None:
        """Makes none yet; `stack` closes those that are made."""
        self._stack = stack
        self._open: dict[EngineConfig, Engine] = {}

    def get(self, config: EngineConfig) -> Engine:
        """Returns the engine of `config`, with all programs compiled."""
        if config not in self._open:
            # Requests come at any moment, as in a server: a burst may make them wait no longer than there.
            engine = self._stack.enter_context(closing(Engine(config, SERVING_SECONDS)))
            engine.wait_until_compiled()
            self._open[config] = engine
        return self._open[config]


def prefill_config(config: EngineConfig) -> EngineConfig:
    """Returns the config of an engine that computes prompts for one of `config`, and no token after the first.

    One that planned ahead would have begun with the second token when the first is read. Drafts stay on, because their
    KV travels too.
    """
    return replace(config, async_scheduling=False)


def make_driver(rung: Rung, sizes: Sizes, engines: LadderEngines) -> Driver:
    """Returns the driver of `rung`."""
    config = sizes.config(rung)
    engine = engines.get(config)
    match rung.way:
        case Way.RECOMPUTING:
            # As many requests at once as would have room for the longest text: those of static batches.
            cache = engine.replicas[0].scheduler.cache
            return Recomputing(engine, cache.num_pages // pages_for(sizes.max_model_len - 1, config.page_size))
        case Way.SERVING:
            return Serving(engine)
        case Way.APART:
            return Apart(prefill=engines.get(prefill_config(config)), decode=engine)


def measure_ladder(
    rungs: Sequence[Rung], options: LadderOptions, sizes: Sizes, tell: Callable[[str], object]
) -> Ladder:
    """Measures `rungs`, round after round, so that what else the machine does meets all of them.

    The first run of a rung warms up and does not count, unless it is the only one. `tell` gets a line now and then.
    Raises DifferentTokens when a run has other tokens than the first run of all.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        engines, drivers = LadderEngines(stack), dict[str, Driver]()
        for rung in rungs:
            tell(f"starting {rung.name}")
            drivers[rung.name] = make_driver(rung, sizes, engines)
        tokenizer = engines.get(sizes.config(rungs[0])).tokenizer
        assert tokenizer is not None, "the embedded model has a tokenizer"
        workload = TimedChats.draw(tokenizer, options.requests, options.seed, options.arrivals)
        start_seconds = time.perf_counter() - start
        counted: dict[str, list[RungRun]] = {rung.name: [] for rung in rungs}
        expected: tuple[str, RungRun] | None = None
        for number in range(options.rounds + 1):
            tell(f"round {number} of {options.rounds}" if number else "warming up")
            for rung in rungs if number % 2 == 0 else rungs[::-1]:
                if rung.runs_once and counted[rung.name]:
                    continue
                run = drivers[rung.name].run(workload)
                expected = expected or (rung.name, run)
                check_tokens(*expected, rung.name, run)
                if number or rung.runs_once:
                    counted[rung.name].append(run)
    assert expected is not None, "there is a rung and a round"
    return Ladder(
        options,
        device_name(),
        workload.num_prompt_tokens,
        sum(map(len, expected[1].tokens)),
        tuple(MeasuredRung(rung, tuple(counted[rung.name])) for rung in rungs),
        start_seconds,
        time.perf_counter() - start,
    )


def device_name() -> str:
    """Returns what a reader must know of the machine."""
    device = jax.devices()[0]
    return f"a CPU with {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind


def check_tokens(first: str, expected: RungRun, rung: str, run: RungRun) -> None:
    """Raises DifferentTokens when `run` of `rung` has other tokens than `expected` of the rung `first`."""
    for number, (wanted, got) in enumerate(zip(expected.tokens, run.tokens, strict=True)):
        if wanted != got:
            pairs = zip(wanted, got, strict=False)
            at = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
            raise DifferentTokens(
                f"rung {rung} gives request {number} other tokens than rung {first}, from output token {at} on: "
                f"{list(got[at : at + 3])}, not {list(wanted[at : at + 3])}. Ideas of serving must not change tokens, "
                "so this is a bug: please report it with the command"
            )
