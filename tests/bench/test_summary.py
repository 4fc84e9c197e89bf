"""What a run measured: when its tokens came, and what is made of that."""

import json

import numpy as np
import pytest

from jaxvllm.bench.load import LoadOutcome
from jaxvllm.bench.recording import Record, Recorder
from jaxvllm.bench.summary import Goodput, measure
from jaxvllm.bench.traffic import Traffic
from jaxvllm.bench.vocabulary import Vocabulary


def event(**chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(piece, reason=None):
    return event(choices=[{"text": piece, "finish_reason": reason}])


def delta(reason=None, **new):
    return event(choices=[{"delta": new, "finish_reason": reason}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("heard", "ttft", "latency", "itl"),
    [
        # Sent at 10. The last token and the reason come as one chunk, as vLLM sends them.
        ([(11, text("a")), (13, text("b")), (16, text("c", "length")), (17, USAGE), (18, DONE)], 1, 6, (2, 3)),
        # An empty text is a token all the same, such as half a character; the reason alone is none.
        ([(11, text("")), (13, text("b") + text("c")), (16, text("", "stop") + USAGE + DONE)], 1, 6, (2, 0)),
        # A role that is sent at once is no token; comments are nothing.
        (
            [(10.5, delta(role="assistant", content="")), (11, b": ping\n\n"), (12, delta(content="a"))]
            + [(14, delta(content="b")), (14, delta("stop")), (15, USAGE + DONE)],
            2, 4, (2,),
        ),
        # Nothing but the reason: the first token ended it.
        ([(12, delta(role="assistant", content="")), (13, delta("stop") + USAGE + DONE)], 3, 3, ()),
    ],
)  # fmt: skip
def test_times_are_those_of_tokens(heard, ttft, latency, itl):
    recorder = Recorder(start=10.0, queued=0.5, num_prompt_tokens=None)
    for now, data in heard:
        recorder.receive(200, data, float(now))
    record = recorder.record()
    assert record.succeeded, record.error
    assert (record.ttft, record.latency, record.itl) == (ttft, latency, itl)
    assert (record.num_prompt_tokens, record.num_output_tokens, record.queued) == (7, 3, 0.5)
    assert record.tpot == (latency - ttft) / 2


@pytest.mark.parametrize(
    ("status", "data", "error"),
    [
        (503, b'{"error": {"message": "full"}}', "the server answers 503: full"),
        (200, text("a"), "the server ended the stream before it was done"),
        (200, USAGE + DONE, "the server sent no token: was the request streamed?"),
    ],
)
def test_failures_are_told(status, data, error):
    recorder = Recorder(0.0, 0.0, 3)
    recorder.receive(status, data, 1.0)
    assert recorder.record().error == error


def test_the_figures_of_a_small_run():
    records = (
        Record(start=100, queued=0, num_prompt_tokens=10, num_output_tokens=3, ttft=0.2, latency=1.0, itl=(0.4, 0.4)),
        Record(start=101, queued=0.5, num_prompt_tokens=20, num_output_tokens=1, ttft=0.5, latency=0.5),
        Record(start=101.5, queued=0, num_prompt_tokens=30, num_output_tokens=6, ttft=0.7, latency=1.9, itl=(1.2,)),
        Record(start=101.6, queued=0, num_prompt_tokens=40, error="broken"),
    )
    outcome = LoadOutcome(records, duration=4.0, cpu_seconds=0.1)
    summary = measure(outcome, [50, 99], Goodput.parse(["ttft:500", "tpot:400.1"]))
    assert (summary.completed, summary.failed, summary.total_input, summary.total_output) == (3, 1, 60, 10)
    assert (summary.request_throughput, summary.output_throughput, summary.total_token_throughput) == (0.75, 2.5, 17.5)
    assert summary.request_goodput == 0.5, "the third came too late"
    assert summary.peak_concurrency == 1, "each begins as the one before ends"
    # By seconds since 100: tokens at 0.2, 0.6, 1.0; at 1.5; three at 2.2 and three at 3.4.
    assert summary.peak_output_tokens == 3
    ttft, tpot, itl = (summary.latencies[name] for name in ("ttft", "tpot", "itl"))
    assert ttft.median == pytest.approx(500)
    assert ttft.mean == pytest.approx(np.mean([200, 500, 700]))
    assert ttft.std == pytest.approx(np.std([200, 500, 700]))
    assert ttft.percentiles[99] == pytest.approx(np.percentile([200, 500, 700], 99))
    assert tpot.mean == pytest.approx((400 + 240) / 2), "the request of one token has none"
    assert itl.mean == pytest.approx((400 + 400 + 1200) / 3), "every chunk counts alike"
    assert summary.latencies["client_queue_time"].mean == pytest.approx(500 / 3)


def test_a_run_in_which_everything_failed_has_zeros():
    summary = measure(LoadOutcome((Record(0.0, 0.0, 1, error="x"),), 1.0, 0.0), [99])
    assert (summary.completed, summary.failed, summary.peak_output_tokens, summary.peak_concurrency) == (0, 1, 0, 0)
    assert summary.latencies["ttft"].percentiles == {99: 0}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_are_gamma_distributed_and_keep_the_rate(burstiness):
    times = Traffic(20_000, 50.0, burstiness).arrivals(np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(400.0) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once():
    assert Traffic(3).arrivals(np.random.default_rng(0)) == [0, 0, 0]


def test_a_local_tokenizer_draws_no_special_token_and_counts_as_the_model_does():
    from pathlib import Path

    from jaxvllm.bench.vocabulary import LocalTokenizer

    tokenizer = LocalTokenizer(Path("jaxvllm/assets/demo"))
    special = set(range(7))
    drawn = set(Vocabulary(tokenizer, None, sends_text=False).draw(np.random.default_rng(0), 50_000))
    assert not drawn & special and max(drawn) == 2047 and len(drawn) > 1900
    assert max(Vocabulary(tokenizer, 100, sends_text=False).draw(np.random.default_rng(0), 1000)) == 99
    assert Vocabulary(tokenizer, None, sends_text=True).count("Once upon a time") == len(
        tokenizer.encode("Once upon a time")
    )


def test_random_text_is_as_long_as_what_was_drawn():
    from pathlib import Path

    from jaxvllm.bench.vocabulary import LocalTokenizer

    vocabulary = Vocabulary(LocalTokenizer(Path("jaxvllm/assets/demo")), 1000, sends_text=True)
    rng = np.random.default_rng(0)
    for length in (16, 64, 256, 896) * 4:
        read = vocabulary.count(vocabulary.prompt(vocabulary.draw(rng, length)))
        assert abs(read - length) <= 4, "a fifth more, when texts are not cut"
