"""`MeasuredCost`: the times of steps as an engine took them, in a table that is kept as JSON."""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray

from jaxvllm.ranges import Range, Tokens, check_ranges
from jaxvllm.runtime.state import ADMISSION_BATCH
from jaxvllm.simulator.step_cost import StepWork

# Fewer steps than this say nothing about a bucket: its time is then between those of its neighbours.
MIN_SAMPLES = 4
# Samples farther from the fit than this, in standard deviations of a normal distribution, are left out: the machine did
# something else for a while.
OUTLIER = 10.0
_QUANTILES = 20
_MOST_JITTER = 5.0  # times the usual time; more is a machine that did something else
_ROUNDS = 40  # in which the times of steps that are known by a bound come to what the others say


@dataclass(frozen=True)
class StepSample:
    """A step that an engine took, and how long it seemed to take.

    The host sees when the device begins and ends only where it waits for these moments. Where it comes too late for the
    end, the device took no longer than it seems. Where it came too late for the begin, the device took no less.
    """

    work: StepWork
    device_seconds: float
    saw_begin: bool
    saw_end: bool
    launch_seconds: float
    read_seconds: float

    @property
    def is_exact(self) -> bool:
        return self.saw_begin and self.saw_end

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most seconds that the device may have taken."""
        least = self.device_seconds if self.saw_end else 0.0
        return least, self.device_seconds if self.saw_begin or not self.saw_end else math.inf


Seconds = Annotated[float, Range(0, 1e6)]


@dataclass(frozen=True, order=True)
class BucketTime:
    """The seconds of one step in a bucket, before the keys and values that it reads."""

    num_tokens: Tokens
    num_rows: Tokens
    seconds: Seconds

    def __post_init__(self) -> None:
        check_ranges(self, written_as_flags=False)


@dataclass(frozen=True)
class MeasuredCost:
    """The times of the buckets, and what each call, each position and each row adds. All are seconds.

    A bucket that is not in the table takes a time between those of its neighbours in tokens, or as much a token as the
    largest.
    """

    decode: tuple[BucketTime, ...]  # ascending in rows
    mixed: tuple[BucketTime, ...]  # ascending in tokens, then rows
    decode_call: Seconds  # of a call of decode steps, however many they are
    decode_position: Seconds  # that a row which decodes reads
    prompt_pair: Seconds  # of a query of a prompt and a position that it sees
    # After a step that is under way the device shares the processors with the host, which reads that step and launches
    # the next one. Decode steps after decode steps always do: `decode_call` has it.
    decode_behind: Seconds  # of a call of decode steps after a step with prompts
    mixed_behind: Seconds  # of a step with prompts after any step
    launch_call: Seconds  # of the host, to plan and launch decode steps
    launch_mixed: Seconds  # of the host, to plan and launch a step with prompts
    admission_call: Seconds  # of the host, for each `ADMISSION_BATCH` of requests that get slots
    admission: Seconds  # of the host, for each request that gets a slot
    read_call: Seconds  # of the host, to read a call
    read_row: Seconds  # of the host, for each row of it
    read_token: Seconds  # of the host, for a row that decodes, in each of its steps
    request_seconds: Seconds  # of the host, for each request, beside the steps
    # Quantiles of what steps took over what the table says, 1 on average. The pace of bursts depends on them: after a
    # step that was quick by chance, a program takes several, and a token takes less.
    jitter: tuple[Seconds, ...] = (1.0,)
    model: str = ""
    device: str = "cpu"  # by the planner's names
    origin: dict[str, Any] = field(default_factory=dict, compare=False)  # where and when it was measured

    def __post_init__(self) -> None:
        check_ranges(self, written_as_flags=False)
        if not self.decode or not self.mixed:
            raise ValueError("a table of step times needs decode steps and steps with prompts: measure for longer")

    @property
    def largest(self) -> tuple[int, int]:
        """The most requests of a decode step, and the most tokens of a step, that were measured."""
        return self.decode[-1].num_rows, self.mixed[-1].num_tokens

    def device_seconds(self, work: StepWork) -> float:
        bucket = work.bucket
        reads = self.decode_position * work.decode_positions()
        if bucket.is_decode:
            call = self.decode_call + self.decode_behind * work.is_behind
            return call + work.num_steps * (self._decode_seconds(bucket.num_rows) + reads)
        prompts = self.prompt_pair * work.prompt_pairs() + self.mixed_behind * work.is_behind
        return self._mixed_seconds(bucket.num_tokens, bucket.num_rows) + reads + prompts

    def launch_seconds(self, work: StepWork) -> float:
        return _sum(_launch_terms(work), (self.launch_call, self.launch_mixed, self.admission_call, self.admission))

    def read_seconds(self, work: StepWork) -> float:
        return _sum(_read_terms(work), (self.read_call, self.read_row, self.read_token))

    def _decode_seconds(self, num_rows: int) -> float:
        key = (num_rows, num_rows)
        if key not in self._known:
            self._known[key] = _between([(one.num_rows, one.seconds) for one in self.decode], num_rows)
        return self._known[key]

    def _mixed_seconds(self, num_tokens: int, num_rows: int) -> float:
        key = (num_tokens, num_rows)
        if key not in self._known:
            # Buckets of the same tokens differ little, by the LM head of their rows: the nearest in rows is taken.
            nearest: dict[int, BucketTime] = {}
            for one in self.mixed:
                held = nearest.get(one.num_tokens)
                if held is None or abs(one.num_rows - num_rows) < abs(held.num_rows - num_rows):
                    nearest[one.num_tokens] = one
            self._known[key] = _between([(one.num_tokens, one.seconds) for one in nearest.values()], num_tokens)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    @classmethod
    def fit(
        cls,
        samples: Sequence[StepSample],
        request_seconds: float,
        model: str = "",
        device: str = "cpu",
        origin: dict[str, Any] | None = None,
    ) -> Self:
        """Returns the table that explains `samples` best.

        It is the least squares fit in which an error of a tenth counts as much in short steps as in long ones.
        Raises ValueError when there are too few samples.
        """
        decode = [sample for sample in samples if sample.work.bucket.is_decode]
        mixed = [sample for sample in samples if not sample.work.bucket.is_decode]
        decode_times, (call, position, decode_behind) = _fit_buckets(decode, _decode_terms)
        mixed_times, (pair, mixed_behind) = _fit_buckets(
            # What decode rows read is known from decode steps, which read little else. Unlike bursts, steps with
            # prompts all have the same work of the host around them: if it comes too late for one, the next seems
            # quicker, and they take together what they seem to take.
            [
                replace(
                    one,
                    device_seconds=one.device_seconds - position * one.work.decode_positions(),
                    saw_begin=True,
                    saw_end=True,
                )
                for one in mixed
            ],
            _mixed_terms,
        )
        launch_call, launch_mixed, admission_call, admission = _fit_host(
            [(_launch_terms(one.work), one.launch_seconds) for one in samples]
        )
        read_call, read_row, read_token = _fit_host([(_read_terms(one.work), one.read_seconds) for one in samples])
        table = cls(
            decode_times,
            mixed_times,
            decode_call=call,
            decode_position=position,
            prompt_pair=pair,
            decode_behind=decode_behind,
            mixed_behind=mixed_behind,
            launch_call=launch_call,
            launch_mixed=launch_mixed,
            admission_call=admission_call,
            admission=admission,
            read_call=read_call,
            read_row=read_row,
            read_token=read_token,
            request_seconds=request_seconds,
            model=model,
            device=device,
            origin=origin or {},
        )
        return replace(table, jitter=_jitter(table, samples))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a table. Raises ValueError for a file that is none."""
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            decode, mixed = (tuple(BucketTime(**one) for one in entries.pop(name)) for name in ("decode", "mixed"))
            return cls(decode, mixed, **entries | {"jitter": tuple(entries["jitter"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"--table {path} must be step times that `jaxvllm bench steps` wrote: {error}") from None


def _jitter(table: MeasuredCost, samples: Sequence[StepSample]) -> tuple[float, ...]:
    """Returns the quantiles of the steps' times over what `table` says, of those whose time is known."""
    ratios = [one.device_seconds / table.device_seconds(one.work) for one in samples if one.is_exact]
    found = np.quantile(np.minimum(ratios, _MOST_JITTER), (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    return tuple(float(value) for value in found / found.mean())


def _decode_terms(work: StepWork) -> tuple[float, tuple[float, ...]]:
    """Returns how often the bucket's own time counts, and the factors of the others: call, position, after another."""
    return work.num_steps, (1.0, work.num_steps * work.decode_positions(), work.is_behind)


def _launch_terms(work: StepWork) -> tuple[float, ...]:
    """Returns how often each of the host's times counts: of decode steps, of others, of admissions."""
    has_prompts = work.num_prompts > 0
    return not has_prompts, has_prompts, -(-work.num_admissions // ADMISSION_BATCH), work.num_admissions


def _read_terms(work: StepWork) -> tuple[float, ...]:
    """Returns how often each of the host's times counts: of a call, a row, a decoded token."""
    return 1.0, len(work.starts), work.num_decode * work.num_steps


def _sum(terms: Sequence[float], seconds: Sequence[float]) -> float:
    return math.fsum(count * each for count, each in zip(terms, seconds, strict=True))


def _fit_host(samples: Sequence[tuple[tuple[float, ...], float]]) -> list[float]:
    """Returns the time of each term."""
    seconds = np.array([seconds for _, seconds in samples])
    solved = _least_squares(np.array([terms for terms, _ in samples], np.float64), seconds, seconds)
    return [float(value) for value in solved]


def _mixed_terms(work: StepWork) -> tuple[float, tuple[float, ...]]:
    return 1.0, (work.prompt_pairs(), work.is_behind)


def _fit_buckets(samples: Sequence[StepSample], terms: Any) -> tuple[tuple[BucketTime, ...], tuple[float, ...]]:
    """Returns the time of each bucket that has enough samples, and the times that all buckets share."""
    of_bucket = defaultdict(list)
    for sample in samples:
        of_bucket[sample.work.bucket].append(sample)
    buckets = sorted(bucket for bucket, found in of_bucket.items() if len(found) >= MIN_SAMPLES)
    if not buckets:
        raise ValueError(f"{len(samples)} steps are too few for a table of step times: measure for longer")
    rows, bounds = [], []
    for column, bucket in enumerate(buckets):
        for sample in of_bucket[bucket]:
            own, shared = terms(sample.work)
            row = np.zeros(len(buckets) + len(shared))
            row[column] = own
            row[len(buckets) :] = shared
            rows.append(row)
            bounds.append(sample.bounds)
    solved = _least_squares(np.array(rows), *np.array(bounds).T)
    times = tuple(
        BucketTime(bucket.num_tokens, bucket.num_rows, float(value))
        for bucket, value in zip(buckets, solved[: len(buckets)], strict=True)
    )
    return times, tuple(float(value) for value in solved[len(buckets) :])


def _least_squares(
    terms: NDArray[np.float64], least: NDArray[np.float64], most: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns factors of at least 0 for which `terms` explain seconds, without samples that do not fit at all.

    The seconds of a sample are from `least` to `most`, which are the same where they are known.
    """
    is_exact = least == most
    seconds = np.where(np.isfinite(most), most, least)
    # Columns of very different sizes (positions, calls) would lose digits.
    scale = np.maximum(np.abs(terms).max(axis=0, initial=0.0), 1e-30)
    kept = np.ones(len(seconds), np.bool_)
    weights = np.full(len(seconds), 1 / max(float(seconds.mean()), 1e-9))
    wanted = seconds
    for _ in range(4 if is_exact.all() else _ROUNDS):
        found = _positive_solution((terms / scale * weights[:, None])[kept], (wanted * weights)[kept]) / scale
        expected = np.maximum(terms @ found, 1e-6)
        wanted = np.clip(expected, least, most)
        # By the expected time and not by the sample's own: the sum of all times stays what it was.
        weights = 1 / expected
        errors = np.abs(wanted * weights - 1)
        usual = float(np.median(errors[is_exact])) if is_exact.any() else math.inf
        kept = errors <= max(OUTLIER * usual / 0.6745, 1e-9)
    return np.asarray(found, np.float64)


def _positive_solution(terms: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns factors x >= 0 for which `terms @ x` is near `wanted`. What would be negative has no effect, and is 0."""
    found, used = np.zeros(terms.shape[1]), np.ones(terms.shape[1], np.bool_)
    while used.any():
        found[used] = np.linalg.lstsq(terms[:, used], wanted)[0]
        if (found >= 0).all():
            break
        used &= found >= 0
        found[~used] = 0.0
    return found


def _between(points: Sequence[tuple[int, float]], size: int) -> float:
    """Returns the seconds at `size` on the line through its two neighbours, or in proportion beyond the largest."""
    points = sorted(points)
    at = bisect_left([x for x, _ in points], size)
    if at == len(points):
        x, y = points[-1]
        return y * size / x
    if at == 0 or points[at][0] == size:
        return points[at][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
