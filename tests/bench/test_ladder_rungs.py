"""The rungs of `jaxvllm bench ladder` on small engines of the embedded model: other steps, and the same tokens."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import pytest

from jaxvllm.bench.ladder import measure
from jaxvllm.bench.ladder import rung as rungs
from jaxvllm.bench.ladder.drivers import Apart, Recomputing, Serving
from jaxvllm.bench.ladder.figures import FIGURES, WASTED
from jaxvllm.bench.ladder.measure import (
    DifferentTokens,
    Ladder,
    LadderEngines,
    LadderOptions,
    measure_ladder,
    prefill_config,
)
from jaxvllm.bench.ladder.run import RungRun
from jaxvllm.bench.ladder.rung import RUNGS, Rung, Sizes, chosen_rungs
from jaxvllm.bench.ladder.workload import TimedChats
from jaxvllm.cli.bench import main
from jaxvllm.config import EngineConfig
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.burst_pace import BurstPace
from jaxvllm.engine.draft_pace import DraftPace
from jaxvllm.engine.engine import Engine
from tests.engine.tiny import all_drafts_or_none

pytestmark = pytest.mark.usefixtures("quick_programs")

OPTIONS = LadderOptions(requests=3, arrivals=0.05, rounds=1)
BY_NAME = {rung.name: rung for rung in RUNGS}


@dataclass(frozen=True)
class SmallSizes(Sizes):
    """Two slots for the longest text, few programs, and a cache of them that all engines of these tests share."""

    max_model_len: int = 384
    max_num_seqs: int = 4
    num_pages: int = 49
    whole_tokens: int = 256
    chunk_tokens: int = 32
    row_buckets: tuple[int, ...] = (4,)
    token_buckets: tuple[int, ...] = (32, 256)
    cache: str = ""

    def config(self, rung: Rung) -> EngineConfig:
        return replace(super().config(rung), compilation_cache=self.cache)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> SmallSizes:
    return SmallSizes(cache=str(tmp_path_factory.mktemp("programs")))


class Eager(DraftPace):
    """Always wants drafts, whatever they cost on this machine."""

    def choose(self, num_rows: int, most: Mapping[int, float]) -> int:
        return max(most)


class PacedEngines(LadderEngines):
    """The speed of this machine decides nothing: there are bursts and drafts wherever there may be some.

    So no step divides drafts among its rows, and no rung here needs masks, copies of requests or rare parameters: the
    programs for these are not compiled.
    """

    def get(self, config: EngineConfig) -> Engine:
        with all_drafts_or_none():
            engine = super().get(config)
        pace = BurstPace(max_seconds=1e9)
        for num_rows in range(1, 5):
            pace.measured(num_rows, 1, 1e-3)
        for replica in engine.replicas:
            replica.pace._plain = pace
            replica.pace._drafted = dict.fromkeys(range(1, 8), pace)
            replica.pace._drafts = Eager(())
        return engine


@pytest.fixture(scope="module")
def engines() -> Iterator[LadderEngines]:
    with ExitStack() as stack:
        yield PacedEngines(stack)


@dataclass(frozen=True)
class Command:
    """What `jaxvllm bench ladder` has measured, printed and written."""

    exit_code: int
    ladder: Ladder
    printed: str
    picture: bytes
    written: dict[str, Any]


@pytest.fixture(scope="module")
def command(sizes: SmallSizes, engines: LadderEngines, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The whole command on the small engines: all rungs, with a run of each that counts."""
    folder = tmp_path_factory.mktemp("ladder")
    picture, file = folder / "ladder.png", folder / "ladder.json"
    flags = [f"--requests={OPTIONS.requests}", f"--arrivals={OPTIONS.arrivals}", f"--rounds={OPTIONS.rounds}"]
    ladders, printed = list[Ladder](), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(measure, "LadderEngines", lambda _: engines)
        patch.setattr(rungs, "Sizes", lambda: sizes)
        patch.setattr(measure, "measure_ladder", lambda *given: ladders.append(measure_ladder(*given)) or ladders[-1])
        code = main(["ladder", *flags, "--output", str(picture), "--json", str(file)])
    [ladder] = ladders
    return Command(code, ladder, printed.getvalue(), picture.read_bytes(), json.loads(file.read_text()))


@pytest.fixture(scope="module")
def runs(command: Command) -> dict[str, RungRun]:
    """The run of each rung that counts."""
    return {each.rung.name: each.runs[0] for each in command.ladder.rungs}


@pytest.mark.slow
def test_the_whole_command(command: Command) -> None:
    assert command.exit_code == 0
    assert command.ladder.options == OPTIONS
    assert command.picture.startswith(b"\x89PNG")
    names = [each["name"] for each in command.written["rungs"]]
    assert names == [each.name for each in RUNGS]
    assert all(f"\n{name} " in command.printed for name in names)


def test_all_rungs_give_the_same_tokens(runs: dict[str, RungRun]) -> None:
    tokens = runs["no-cache"].tokens
    assert max(map(len, tokens)) > 50
    for name, run in runs.items():
        assert run.tokens == tokens, name


def test_every_figure_is_there(runs: dict[str, RungRun]) -> None:
    for name, run in runs.items():
        for figure in FIGURES:
            value = figure.of(run)
            assert (value is None) == (name == "no-cache" and figure is WASTED)
            assert value is None or value >= 0
        assert all(list(answer.times) == sorted(answer.times) for answer in run.answers)
        assert all(answer.time_to_first_token > 0 for answer in run.answers)


def test_each_idea_does_what_it_says(runs: dict[str, RungRun]) -> None:
    longest = max(map(len, runs["v1"].tokens))
    assert runs["no-cache"].num_calls >= runs["static"].num_calls
    # Two slots for three requests, until pages are given out as they are needed.
    assert [runs[name].most_running for name in ("no-cache", "static", "continuous", "paged")] == [2, 2, 2, 3]
    assert runs["continuous"].num_calls < runs["static"].num_calls
    wasted = {name: run.wasted for name, run in runs.items() if run.wasted is not None}
    assert min(wasted["static"], wasted["continuous"]) > 0.3 > 0.15 > wasted["paged"]
    assert runs["chunked"].num_calls > runs["paged"].num_calls
    assert runs["bursts"].num_calls < runs["prefix"].num_calls
    assert runs["bursts"].num_steps >= longest > runs["bursts"].num_calls
    assert runs["speculation"].num_steps < runs["bursts"].num_steps


def test_engines_are_idle_afterwards(runs: dict[str, RungRun], sizes: SmallSizes, engines: LadderEngines) -> None:
    for rung in RUNGS:
        engine = engines.get(sizes.config(rung))
        assert not engine.has_work and engine.stats().num_pages_owned == 0
        engine.replicas[0].scheduler.check_invariants()


def test_prompts_and_answers_are_on_engines_of_their_own(
    runs: dict[str, RungRun], sizes: SmallSizes, engines: LadderEngines
) -> None:
    config = sizes.config(BY_NAME["apart"])
    prefill, decode = engines.get(prefill_config(config)), engines.get(config)
    before = [engine.stats().num_output_tokens for engine in (prefill, decode)]
    run = Apart(prefill, decode).run(TimedChats.draw(decode.tokenizer, 2, 0, 0.0))
    added = [engine.stats().num_output_tokens - was for engine, was in zip((prefill, decode), before, strict=True)]
    # How an answer ends is counted, and not part of it.
    assert added[0] == 2 and sum(added) == sum(len(tokens) for tokens in run.tokens)


def test_a_failure_of_one_engine_ends_both(
    sizes: SmallSizes, engines: LadderEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sizes.config(BY_NAME["apart"])
    prefill, decode = engines.get(prefill_config(config)), engines.get(config)

    def fails(_: object) -> str:
        raise RuntimeError("no room")

    monkeypatch.setattr(decode, "import_request", fails)
    with pytest.raises(RuntimeError, match="no room"):
        Apart(prefill, decode).run(TimedChats.draw(decode.tokenizer, 2, 0, 0.0))
    for number in ("0", "1"):
        prefill.abort(number)
    while prefill.has_work:
        prefill.step()


def test_recomputing_needs_an_engine_that_keeps_nothing(sizes: SmallSizes, engines: LadderEngines) -> None:
    with pytest.raises(ValueError, match="turn enable_prefix_caching off"):
        Recomputing(engines.get(sizes.config(BY_NAME["prefix"])), 2)


def measured(sizes: SmallSizes, monkeypatch: pytest.MonkeyPatch, engines: LadderEngines, told: list[str]) -> Ladder:
    """Measures two rungs on the engines that all tests share."""
    monkeypatch.setattr("jaxvllm.bench.ladder.measure.LadderEngines", lambda _: engines)
    return measure_ladder(chosen_rungs(["paged", "continuous"]), OPTIONS, sizes, told.append)


def test_rungs_are_measured_in_rounds(
    sizes: SmallSizes, engines: LadderEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    ladder = measured(sizes, monkeypatch, engines, told)
    assert told == ["starting continuous", "starting paged", "warming up", "round 1 of 1"]
    assert [(one.rung.name, len(one.runs)) for one in ladder.rungs] == [("continuous", 1), ("paged", 1)]
    assert ladder.num_output_tokens == sum(map(len, ladder.rungs[0].runs[0].tokens))
    assert 0 <= ladder.start_seconds < ladder.seconds


def test_a_rung_with_other_tokens_is_an_error(
    sizes: SmallSizes, engines: LadderEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Serving):
        def run(self, workload: TimedChats) -> RungRun:
            run = super().run(workload)
            if self._engine.config.scheduler == "continuous":
                return run
            first, *others = run.answers
            wrong = replace(first, token_ids=(first.token_ids[0] + 1, *first.token_ids[1:]))
            return replace(run, answers=(wrong, *others))

    monkeypatch.setattr("jaxvllm.bench.ladder.measure.Serving", Wrong)
    with pytest.raises(DifferentTokens, match="rung paged gives request 0 other tokens than rung continuous"):
        measured(sizes, monkeypatch, engines, [])


@pytest.mark.parametrize(("name", "plans_ahead"), [("chunked", False), ("v1", True)])
def test_the_host_plans_ahead_where_it_may(
    name: str, plans_ahead: bool, sizes: SmallSizes, engines: LadderEngines
) -> None:
    engine = engines.get(sizes.config(BY_NAME[name]))
    engine.submit(engine.check("0", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    was_busy = []
    while engine.has_work:
        engine.step()
        was_busy.append(engine.replicas[0].is_busy)
    # The first call of one that plans ahead reads nothing.
    assert len(was_busy) == 20 + plans_ahead and any(was_busy) == plans_ahead
