"""A start says where its time went, and leaves nothing out."""

import gc
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import SamplingParams
from jaxvllm.engine import startup
from jaxvllm.engine.startup import StartPhase, StartupClock, uncollected
from jaxvllm.runtime.programs import Programs
from tests.engine.tiny import tiny_llm
from tests.quick import programs_in_advance


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(startup, "time", time)
    monkeypatch.setattr(startup, "seconds_since_process_start", lambda: 2.0)
    return time


def test_the_collector_never_visits_what_a_start_has_made() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_every_second_is_in_one_phase(time: Time) -> None:
    clock = StartupClock()
    time.now += 1
    for seconds in (3, 4):
        with clock.phase("weights"):
            time.now += seconds
    with clock.phase("programs"):
        time.now += 5
    time.now += 6
    clock.ready(num_loaded=7, num_compiled=8)
    early = clock.report()
    assert early.phases == (
        StartPhase("imports", 2),
        StartPhase("weights", 7),
        StartPhase("programs", 5),
        StartPhase("other", 7),
    )
    assert early.seconds == 2 + time.now - 100 and early.first_token_seconds is None
    assert str(early) == (
        "engine started in 21.00 s: "
        "imports 2.00, weights 7.00, programs 5.00, other 7.00 (7 programs loaded, 8 compiled)"
    )
    time.now += 9
    clock.first_token()
    assert clock.is_over
    assert str(clock.report()) == f"{early}; first token 9.00 s later"


def test_where_the_system_does_not_tell_the_first_phase_is_missing(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    monkeypatch.setattr(startup, "seconds_since_process_start", lambda: None)
    assert [phase.name for phase in StartupClock().report().phases] == ["other"]


def test_an_engine_knows_its_start(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with programs_in_advance(), tiny_llm(tiny_checkpoint, max_decode_burst=1) as llm:
        steps: list[Programs[Any]] = []
        monkeypatch.setattr(Programs, "compile_more", lambda self: steps.append(self))
        llm.generate([[3, 4]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.engine.holders[0].programs in steps, "the others are compiled from the end of the first step on"
        monkeypatch.undo()
        report = llm.engine.startup()
    assert [phase.name for phase in report.phases] == [
        *("imports", "devices", "tokenizer", "weights", "memory", "programs", "other"),
    ]
    assert report.num_loaded + report.num_compiled > 5  # an earlier engine of this run may have stored some
    assert report.first_token_seconds is not None and report.first_token_seconds > 0
