"""`MeasuredCost`: the times of steps as an engine took them, in a table that is kept as JSON."""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from jaxvllm.simulator.step_cost import StepWork

# Fewer steps than this say nothing about a bucket: its time is then between those of its neighbours.
MIN_SAMPLES = 4
# Samples farther from the fit than this, in standard deviations of a normal distribution, are left out: the machine did
# something else for a while.
OUTLIER = 10.0
# The device is done before the host where a step took less than this many times what the host did for it. Then the step
# says how long the host took, and only that the device took no longer.
_HOST_BOUND = 1.4
_QUANTILES = 20
_MOST_JITTER = 5.0  # times the usual time; more is a machine that did something else
_ROUNDS = 40  # in which the times of such steps sink to what the others say


@dataclass(frozen=True)
class StepSample:
    """A step that an engine took, and how long."""

    work: StepWork
    device_seconds: float
    host_seconds: float


@dataclass(frozen=True, order=True)
class BucketTime:
    """The seconds of one step in a bucket, before the keys and values that it reads."""

    num_tokens: int
    num_rows: int
    seconds: float


@dataclass(frozen=True)
class MeasuredCost:
    """The times of the buckets, and what each call, each position and each row adds. All are seconds.

    A bucket that is not in the table takes a time between those of its neighbours in tokens, or as much a token as the
    largest.
    """

    decode: tuple[BucketTime, ...]  # ascending in rows
    mixed: tuple[BucketTime, ...]  # ascending in tokens, then rows
    decode_call: float  # of a call of decode steps, however many they are
    decode_position: float  # that a row which decodes reads
    prompt_pair: float  # of a query of a prompt and a position that it sees
    host_call: float  # of decode steps
    host_mixed: float  # of a step with prompts
    host_token: float  # of a row that decodes, in each of its steps
    host_prompt: float  # of a row that computes a prompt
    request_seconds: float  # of the host, for each request, beside the steps
    # Quantiles of what steps took over what the table says, 1 on average. The pace of bursts depends on them: behind a
    # step that was quick by chance, a program takes several, and a token takes less.
    jitter: tuple[float, ...] = (1.0,)
    model: str = ""
    device: str = "cpu"  # by the planner's names
    origin: dict[str, Any] = field(default_factory=dict, compare=False)  # where and when it was measured

    def __post_init__(self) -> None:
        if not self.decode or not self.mixed:
            raise ValueError("a table of step times needs decode steps and steps with prompts: measure for longer")

    def device_seconds(self, work: StepWork) -> float:
        bucket = work.bucket
        reads = self.decode_position * work.decode_positions()
        if bucket.is_decode:
            return self.decode_call + work.num_steps * (self._decode_seconds(bucket.num_rows) + reads)
        return self._mixed_seconds(bucket.num_tokens, bucket.num_rows) + reads + self.prompt_pair * work.prompt_pairs()

    def host_seconds(self, work: StepWork) -> float:
        call = self.host_mixed if work.num_prompts else self.host_call
        tokens = self.host_token * work.num_decode * work.num_steps
        return call + tokens + self.host_prompt * work.num_prompts

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
        decode_times, (call, position) = _fit_buckets(decode, _decode_terms)
        mixed_times, (pair,) = _fit_buckets(
            # What decode rows read is known from decode steps, which read little else.
            [
                StepSample(one.work, one.device_seconds - position * one.work.decode_positions(), one.host_seconds)
                for one in mixed
            ],
            _mixed_terms,
        )
        host = _least_squares(
            np.array([_host_terms(one.work) for one in samples], np.float64),
            np.array([one.host_seconds for one in samples]),
            np.zeros(len(samples), np.bool_),
        )
        host_call, host_mixed, host_token, host_prompt = (float(one) for one in host)
        table = cls(
            decode_times,
            mixed_times,
            decode_call=call,
            decode_position=position,
            prompt_pair=pair,
            host_call=host_call,
            host_mixed=host_mixed,
            host_token=host_token,
            host_prompt=host_prompt,
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
    """Returns the quantiles of the steps' times over what `table` says, the host's time where that is longer."""
    ratios = [one.device_seconds / max(table.device_seconds(one.work), table.host_seconds(one.work)) for one in samples]
    found = np.quantile(np.minimum(ratios, _MOST_JITTER), (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    return tuple(float(value) for value in found / found.mean())


def _decode_terms(work: StepWork) -> tuple[float, tuple[float, ...]]:
    """Returns how often the bucket's own time counts, and the factors of the other times: a call, a position."""
    return work.num_steps, (1.0, work.num_steps * work.decode_positions())


def _host_terms(work: StepWork) -> tuple[float, ...]:
    has_prompts = work.num_prompts > 0
    return not has_prompts, has_prompts, work.num_decode * work.num_steps, work.num_prompts


def _mixed_terms(work: StepWork) -> tuple[float, tuple[float, ...]]:
    return 1.0, (work.prompt_pairs(),)


def _fit_buckets(samples: Sequence[StepSample], terms: Any) -> tuple[tuple[BucketTime, ...], tuple[float, ...]]:
    """Returns the time of each bucket that has enough samples, and the times that all buckets share."""
    of_bucket = defaultdict(list)
    for sample in samples:
        of_bucket[sample.work.bucket].append(sample)
    buckets = sorted(bucket for bucket, found in of_bucket.items() if len(found) >= MIN_SAMPLES)
    if not buckets:
        raise ValueError(f"{len(samples)} steps are too few for a table of step times: measure for longer")
    rows, seconds, is_most = [], [], []
    for column, bucket in enumerate(buckets):
        for sample in of_bucket[bucket]:
            own, shared = terms(sample.work)
            row = np.zeros(len(buckets) + len(shared))
            row[column] = own
            row[len(buckets) :] = shared
            rows.append(row)
            seconds.append(sample.device_seconds)
            is_most.append(sample.device_seconds < _HOST_BOUND * sample.host_seconds)
    solved = _least_squares(np.array(rows), np.array(seconds), np.array(is_most))
    times = tuple(
        BucketTime(bucket.num_tokens, bucket.num_rows, float(value))
        for bucket, value in zip(buckets, solved[: len(buckets)], strict=True)
    )
    return times, tuple(float(value) for value in solved[len(buckets) :])


def _least_squares(
    terms: NDArray[np.float64], seconds: NDArray[np.float64], is_most: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Returns factors of at least 0 for which `terms` explain `seconds`, without samples that do not fit at all.

    Where `is_most`, the time is at most so many seconds: what is explained by less is explained.
    """
    # Columns of very different sizes (positions, calls) would lose digits.
    scale = np.maximum(np.abs(terms).max(axis=0, initial=0.0), 1e-30)
    kept = np.ones(len(seconds), np.bool_)
    weights = np.full(len(seconds), 1 / max(float(seconds.mean()), 1e-9))
    wanted = seconds
    for _ in range(_ROUNDS if is_most.any() else 4):
        found = _positive_solution((terms / scale * weights[:, None])[kept], (wanted * weights)[kept]) / scale
        expected = np.maximum(terms @ found, 1e-6)
        wanted = np.where(is_most, np.minimum(seconds, expected), seconds)
        # By the expected time and not by the sample's own: the sum of all times stays what it was.
        weights = 1 / expected
        errors = np.abs(wanted * weights - 1)
        kept = errors <= max(
            OUTLIER * (float(np.median(errors[~is_most])) if not is_most.all() else math.inf) / 0.6745, 1e-9
        )
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
