"""Tables of step times: a fit finds the times that made its samples, and a table is read as it was written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxvllm.runtime.buckets import Bucket
from jaxvllm.simulator.measured_cost import BucketTime, MeasuredCost, StepSample
from jaxvllm.simulator.step_cost import StepWork

TABLE = MeasuredCost(
    decode=(BucketTime(1, 1, 0.001), BucketTime(8, 8, 0.002)),
    mixed=(BucketTime(16, 8, 0.003), BucketTime(64, 8, 0.006), BucketTime(64, 32, 0.007)),
    decode_call=0.0005,
    decode_position=1e-6,
    prompt_pair=2e-7,
    decode_behind=0.0009,
    mixed_behind=0.0008,
    launch_call=0.0002,
    launch_mixed=0.0004,
    admission_call=0.0007,
    admission=0.0001,
    read_call=0.0003,
    read_row=1e-6,
    read_token=1e-5,
    request_seconds=3e-5,
    model="demo",
)


def samples(rng: np.random.Generator, count: int) -> list[StepSample]:
    """Steps of every bucket of `TABLE`, which take exactly what it says."""
    found = []
    for times in (*TABLE.decode, *TABLE.mixed):
        for _ in range(count):
            is_decode = times in TABLE.decode
            rows = times.num_rows if is_decode else int(rng.integers(1, times.num_rows))
            starts = rng.integers(0, 400, rows).astype(np.int32)
            lengths = np.ones(rows, np.int32)
            num_prompts = 0 if is_decode else int(rng.integers(1, rows + 1))
            if not is_decode:
                lengths[-1] = rng.integers(2, times.num_tokens - rows + 2)
            bucket = Bucket(times.num_tokens, times.num_rows, width=8 if is_decode else 1)
            steps = int(rng.integers(1, 9)) if is_decode else 1
            admissions = int(rng.integers(0, num_prompts + 1))
            work = StepWork(bucket, starts, lengths, rows - num_prompts, steps, admissions, bool(rng.integers(2)))
            launch, read = TABLE.launch_seconds(work), TABLE.read_seconds(work)
            found.append(StepSample(work, TABLE.device_seconds(work), True, True, launch, read))
    return found


def close(table: MeasuredCost, rel: float) -> bool:
    fields = (
        "decode_call",
        "decode_position",
        "prompt_pair",
        "decode_behind",
        "mixed_behind",
        "launch_call",
        "launch_mixed",
        "admission_call",
        "admission",
        "read_call",
        "read_row",
        "read_token",
    )
    ours = [getattr(table, name) for name in fields] + [one.seconds for one in (*table.decode, *table.mixed)]
    theirs = [getattr(TABLE, name) for name in fields] + [one.seconds for one in (*TABLE.decode, *TABLE.mixed)]
    return ours == pytest.approx(theirs, rel=rel)


def test_a_fit_finds_the_times_that_made_the_samples() -> None:
    table = MeasuredCost.fit(samples(np.random.default_rng(0), 40), 3e-5, "demo")
    assert close(table, 1e-6)
    assert replace(table, decode=TABLE.decode).model == "demo"


def test_noise_and_a_machine_that_stood_still_hardly_move_it() -> None:
    rng = np.random.default_rng(1)
    noisy = [replace(one, device_seconds=one.device_seconds * rng.normal(1, 0.02)) for one in samples(rng, 400)]
    noisy[::100] = [replace(one, device_seconds=one.device_seconds + 1.0) for one in noisy[::100]]
    table = MeasuredCost.fit(noisy, 3e-5)
    clean = [one for index, one in enumerate(noisy) if index % 100]
    predicted = sum(table.device_seconds(one.work) for one in clean)
    assert predicted == pytest.approx(sum(one.device_seconds for one in clean), rel=0.005)


def test_steps_whose_end_the_host_did_not_see_do_not_look_as_slow_as_the_host() -> None:
    """Short bursts end while the host still works. Taken as they seem, calls would cost too much."""
    host = 0.004
    seen = [
        replace(one, device_seconds=max(one.device_seconds, host), saw_end=one.device_seconds > host)
        for one in samples(np.random.default_rng(2), 60)
        if one.work.bucket.is_decode
    ]
    assert 0.1 < np.mean([one.saw_end for one in seen]) < 0.9
    mixed = [one for one in samples(np.random.default_rng(3), 40) if not one.work.bucket.is_decode]
    table = MeasuredCost.fit(seen + mixed, 3e-5)
    assert table.decode_call == pytest.approx(TABLE.decode_call, rel=0.05)
    assert [one.seconds for one in table.decode] == pytest.approx([one.seconds for one in TABLE.decode], rel=0.05)


def test_steps_whose_begin_the_host_did_not_see_do_not_look_quicker_than_they_are() -> None:
    rng = np.random.default_rng(4)
    found = samples(rng, 60)
    late = [
        replace(one, device_seconds=one.device_seconds * rng.uniform(0.2, 0.9), saw_begin=False)
        if one.work.bucket.is_decode and index % 2
        else one
        for index, one in enumerate(found)
    ]
    assert close(MeasuredCost.fit(late, 3e-5), 0.01)


def test_what_the_host_was_too_late_to_see_is_no_jitter() -> None:
    """A host that comes now too early and now too late finds some steps short and others long, which they were not."""
    found = samples(np.random.default_rng(5), 60)
    late = [
        replace(one, device_seconds=one.device_seconds * (1.5 if index % 2 else 0.5), saw_begin=False, saw_end=False)
        for index, one in enumerate(found)
    ]
    table = MeasuredCost.fit(found + [one for one in late if not one.work.bucket.is_decode], 3e-5)
    assert max(table.jitter) < 1.25


def test_a_bucket_that_was_not_measured_lies_between_its_neighbours() -> None:
    def seconds(tokens: int, rows: int) -> float:
        work = StepWork(Bucket(tokens, rows), np.zeros(1, np.int32), np.array([tokens], np.int32), 0)
        return TABLE.device_seconds(work) - TABLE.prompt_pair * work.prompt_pairs()

    assert seconds(40, 8) == pytest.approx(0.0045)
    assert seconds(64, 24) == pytest.approx(0.007)
    assert seconds(128, 8) == pytest.approx(0.012)
    assert seconds(8, 4) == pytest.approx(0.003)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(TABLE.to_json())
    assert MeasuredCost.read(file) == TABLE
    written = TABLE.to_json()
    numbers = [written.replace('"read_call": 0.0003', f'"read_call": {text}') for text in ("NaN", "1e999", "-1")]
    assert written not in numbers
    for wrong in ("{", "[]", '{"decode": [], "mixed": []}', '{"decode": [{"rows": 1}]}', *numbers):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="table.json must be step times that `jaxvllm bench steps` wrote"):
            MeasuredCost.read(file)


def test_positions_and_pairs_are_those_of_counting() -> None:
    starts, lengths = np.array([5, 0, 30], np.int32), np.array([1, 7, 12], np.int32)
    work = StepWork(Bucket(32, 8), starts, lengths, 1)
    rows = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    for window in (None, 1, 4, 33, 100):
        seen = [
            min(position + 1, window or 1000) for start, length in rows for position in range(start, start + length)
        ]
        assert work.pairs(window) == sum(seen)
        read = [min(start + length, (window or 1000) - 1 + length) for start, length in rows]
        assert work.positions(window) == sum(read)
    assert work.decode_positions() == 6
    assert work.prompt_pairs() == sum(range(1, 8)) + sum(range(31, 43))
    burst = StepWork(Bucket(2, 2, width=4), np.array([9, 19], np.int32), np.ones(2, np.int32), 2, 4)
    assert burst.decode_positions() == (10 + 11 + 12 + 13 + 20 + 21 + 22 + 23) / 4 == burst.pairs() == burst.positions()
