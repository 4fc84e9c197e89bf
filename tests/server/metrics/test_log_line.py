"""The line in the log: its words and figures, and when there is none."""

import logging
from dataclasses import replace

import pytest

from jaxvllm.server.metrics import log_line
from jaxvllm.server.metrics.log_line import StatsLogger
from jaxvllm.worker import wire
from tests.server.metrics.engine_reports import FACTS, IDLE, STEP, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_line, "time", clock)
    return clock


def test_the_log_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxvllm")
    log = StatsLogger(10.0)
    busy = replace(IDLE, num_steps=20, num_output_tokens=456, num_prefix_queries=8, num_prefix_hits=2)
    busy = replace(busy, num_running=3, num_pages_owned=10)
    log.on_pulse(wire.Pulse(busy, [STEP] * 10))
    assert not caplog.messages
    clock.now += 10.0
    log.on_pulse(wire.Pulse(busy, [STEP] * 10))
    assert caplog.messages == [
        "Engine 000: Avg prompt throughput: 18.0 tokens/s, Avg generation throughput: 45.6 tokens/s, Running: 3 reqs, "
        "Waiting: 0 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, padding 25%, "
        "host 0.5 ms and device 20.0 ms a step"
    ]


def test_drafts_are_told_where_there_were_any_and_are_no_padding(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxvllm")
    log = StatsLogger(10.0)
    step = replace(STEP, num_prefill=0, num_decode=4, bucket_tokens=16)  # three drafts a row, of which there were eight
    engine = replace(IDLE, num_steps=1, num_verifications=4, num_draft_tokens=8, num_accepted_tokens=5)
    clock.now += 10.0
    log.on_pulse(wire.Pulse(engine, [step]))
    assert "Draft acceptance rate: 62.5%, Mean acceptance length: 2.25, padding 25%, " in caplog.text
    caplog.clear()
    clock.now += 10.0
    log.on_pulse(wire.Pulse(replace(engine, num_steps=2), [step]))
    assert "raft" not in caplog.text and "padding 75%" in caplog.text


def test_a_burst_counts_as_the_decode_steps_that_it_is(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxvllm")
    log = StatsLogger(10.0)
    clock.now += 10.0
    burst = replace(STEP, num_prefill=0, bucket_tokens=4, num_steps=4)
    log.on_pulse(wire.Pulse(replace(IDLE, num_steps=5, num_output_tokens=15), [STEP, burst]))
    assert "padding 25%, host 0.2 ms and device 8.0 ms a step" in caplog.text


def test_the_log_is_quiet_when_idle(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxvllm")
    log = StatsLogger(10.0)
    engine = IDLE

    def ten_seconds(num_steps: int) -> int:
        nonlocal engine
        engine = replace(engine, num_steps=engine.num_steps + num_steps)
        caplog.clear()
        clock.now += 10.0
        log.on_pulse(wire.Pulse(engine, [STEP] * num_steps))
        return len(caplog.messages)

    assert [ten_seconds(num_steps) for num_steps in (0, 5, 5, 0, 0, 0, 1, 0, 0)] == [0, 1, 1, 1, 0, 0, 1, 1, 0]
    engine = IDLE
    log.on_start(2, FACTS)
    assert [ten_seconds(num_steps) for num_steps in (1, 0)] == [1, 1]
    assert "throughput: 0.0 tokens/s" in caplog.text
    assert "padding" not in caplog.text, "no step, no means of steps"


def test_the_log_begins_anew_with_the_engine(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The time without an engine is in no mean, and what its next life counts is counted whole."""
    caplog.set_level(logging.INFO, "jaxvllm")
    log = StatsLogger(10.0)
    log.on_pulse(wire.Pulse(replace(IDLE, num_steps=1, num_output_tokens=400), []))
    clock.now += 90.0
    log.on_start(2, FACTS)
    life = replace(IDLE, num_steps=2, num_output_tokens=500)
    log.on_pulse(wire.Pulse(life, []))
    assert not caplog.messages
    clock.now += 10.0
    log.on_pulse(wire.Pulse(life, []))
    assert "Avg generation throughput: 50.0 tokens/s" in caplog.text
