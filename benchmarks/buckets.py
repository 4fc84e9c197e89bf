"""Chooses the ladder of buckets: the padding that each workload gets with it, beside the programs that it costs.

This needs no device. The real scheduler plans every step of every workload, the ladder pads it, and a clock advances
by what such a step takes (`StepCost`, a straight line). So the figures are the same on every machine, and a ladder
takes seconds. `cpu` has the line that was measured with model S of benchmarks/qwen3.py on two cores, and `accelerator`
that of the roofline of an 8B model on an H100. Each ladder plays twice: with steps that are cut to a size where that is
quicker (`core/step_sizes.py`), and without. Requests of `chat` end at a token of which the host learns late; the others
end at a length that it knows. This prints medians of several seeds, and writes
benchmarks/results/buckets-DATE-COMMIT.json.

`jaxvllm bench throughput` measures the padding of a real engine.

    python -m benchmarks.buckets [--seeds 3]
"""

import argparse
import heapq
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.bench.offline.padding import Padding
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepOutput, StepPlan
from jaxvllm.core.step_sizes import StepSizes
from jaxvllm.runtime.buckets import Bucket, BucketLadder, powers_of_two, row_counts

WIDTH = 8  # decode steps in one program, the engine's default
BURST_SECONDS = 0.004  # what a server allows them
MAX_MODEL_LEN, PAGE_SIZE, VOCABULARY, STOP = 1024, 16, 4096, 2


@dataclass(frozen=True)
class StepCost:
    """The seconds of a step."""

    fixed: float
    decode_row: float
    prefill_token: float

    def seconds(self, bucket: Bucket) -> float:
        return self.fixed + bucket.num_tokens * (self.decode_row if bucket.is_decode else self.prefill_token)


@dataclass(frozen=True)
class Device:
    """The engine's defaults on a device, and the cost of steps there."""

    name: str
    rows: int
    tokens: int
    cost: StepCost
    overhead: int  # of `StepSizes`
    pace: float  # requests a second of `busy` workloads: two thirds of what it completes when all are there at once


# On the CPU, medians of 2026-11-22: 32, 69 and 172 ms for 16, 32 and 64 decode rows, 470 to 635 for 512 tokens. On an
# H100, 16 GB of weights at 3.35 TB/s, and 16 GFLOP a token at 70% of 989 TFLOP/s.
DEVICES = (
    Device("cpu", 64, 512, StepCost(fixed=0.004, decode_row=0.0025, prefill_token=0.0009), overhead=5, pace=1.5),
    Device(
        "accelerator", 256, 2048, StepCost(fixed=0.0048, decode_row=2.3e-5, prefill_token=2.3e-5), overhead=256, pace=55
    ),
)


@dataclass(frozen=True)
class Workload:
    """Requests of random lengths, from the least to the most inclusive."""

    name: str
    requests: int
    input: tuple[int, int]
    output: tuple[int, int]
    rate: float | None = None  # requests a second, a Poisson process; None: all at once
    ends_by_token: bool = False  # at a length that the host does not know before

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng(seed)
        inputs = rng.integers(*self.input, size=self.requests, endpoint=True).tolist()
        outputs = rng.integers(*self.output, size=self.requests, endpoint=True).tolist()
        return list(zip(inputs, outputs, strict=True))

    def arrivals(self, seed: int) -> list[float]:
        if self.rate is None:
            return [0.0] * self.requests
        gaps = np.random.default_rng([seed, 1]).exponential(1 / self.rate, self.requests)
        return [float(second) for second in np.cumsum(gaps)]


def workloads(device: Device) -> tuple[Workload, ...]:
    """Returns as many requests as the device has rows, and more where they arrive over time."""
    count, prompt, answer = device.rows, (16, 512), (16, 128)
    return (
        Workload("decode heavy", count, (16, 32), (64, 256)),
        Workload("prefill heavy", count, (256, 512), (4, 16)),
        Workload("mixed, at once", count, prompt, answer),
        Workload("mixed, busy", 2 * count, prompt, answer, rate=device.pace),
        Workload("mixed, quiet", count, prompt, answer, rate=device.pace / 3),
        Workload("chat", 2 * count, (16, 96), (8, 160), rate=device.pace, ends_by_token=True),
    )


def between(fine: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns ascending `counts` and, from 16 on, as many between two as make `fine` equal distances of one."""
    more = [
        low + (high - low) * part // fine
        for low, high in zip(counts, counts[1:], strict=False)
        if low >= 16
        for part in range(1, fine)
    ]
    return tuple(sorted({*counts, *more}))


def ladders(device: Device) -> Mapping[str, BucketLadder]:
    rows, tokens = powers_of_two(1, device.rows), powers_of_two(16, device.tokens)
    counts = {
        "powers of two": (rows, tokens),
        "rows 1.5 apart": (row_counts(device.rows, "cpu"), tokens),
        "rows 1.25 apart": (between(4, rows), tokens),
        "tokens 1.5 apart": (rows, between(2, tokens)),
        "both 1.5 apart": (row_counts(device.rows, "cpu"), between(2, tokens)),
        "both 1.25 apart": (between(4, rows), between(4, tokens)),
    }
    return {name: BucketLadder.build(*both, width=WIDTH) for name, both in counts.items()}


@dataclass(frozen=True)
class Replay:
    """The result of a workload with a ladder."""

    padding: Padding
    seconds: float  # that all steps and the waits between them take, by `StepCost`
    ttft: float  # mean seconds from a request's arrival to the end of the step with its first token
    steps: int


class Replayer:
    """Plays a workload through the real scheduler, without a device. Outputs lag one step behind, as in the engine."""

    def __init__(self, device: Device, workload: Workload, ladder: BucketLadder, cuts: bool, seed: int):
        cache = KVCache(
            [GroupSize(1 + device.rows * pages_for(MAX_MODEL_LEN, PAGE_SIZE))],
            num_slots=device.rows,
            max_model_len=MAX_MODEL_LEN,
            page_size=PAGE_SIZE,
            max_chunk=device.tokens,
        )
        self._scheduler = Scheduler(SlotTable(device.rows, MAX_MODEL_LEN), cache, POLICIES["v1"], device.tokens)
        sizes = tuple((one.num_tokens, one.num_rows) for one in ladder.buckets if not one.is_decode)
        self._sizes = StepSizes(sizes, device.overhead) if cuts else None
        self._ladder, self._cost = ladder, device.cost
        self._workload, self._lengths = workload, workload.lengths(seed)
        self._arrivals = workload.arrivals(seed)
        self._queue = list(zip(self._arrivals, range(workload.requests), strict=True))
        heapq.heapify(self._queue)
        self._left = [output for _, output in self._lengths]  # tokens until the device ends a request
        self._slots: dict[int, int] = {}  # the request that a slot had last
        self._first: dict[int, float] = {}  # when a request got its first token
        self._now = 0.0
        self._sums = dict.fromkeys(("tokens", "padding_tokens", "ended_tokens", "rows", "padding_rows"), 0)
        self._steps = 0

    def run(self) -> Replay:
        pending: tuple[StepPlan, StepOutput] | None = None
        while True:
            self._arrive()
            step = self._dispatch()
            if pending is not None:
                self._scheduler.update(*pending)
            pending = step
            if step is None and not self._scheduler.has_work:
                if not self._queue:
                    waits = [self._first[index] - arrival for index, arrival in enumerate(self._arrivals)]
                    return Replay(Padding(**self._sums), self._now, statistics.fmean(waits), self._steps)
                self._now = max(self._now, self._queue[0][0])

    def _arrive(self) -> None:
        while self._queue and self._queue[0][0] <= self._now:
            _, index = heapq.heappop(self._queue)
            prompt_len, output_len = self._lengths[index]
            limit = MAX_MODEL_LEN if self._workload.ends_by_token else prompt_len + output_len
            prompt = np.random.default_rng([7, index]).integers(3, VOCABULARY, prompt_len, np.int32)
            params = SamplingParams(max_tokens=limit - prompt_len)
            asked = GenerationRequest(str(index), Prompt(None, prompt), params)
            self._scheduler.add(Request(asked, index, (STOP,), limit, QueueKey(0, index)))

    def _dispatch(self) -> tuple[StepPlan, StepOutput] | None:
        scheduler = self._scheduler
        rows = max(scheduler.num_running, 1)
        one = self._cost.seconds(Bucket(rows, rows))
        plan = scheduler.schedule(max(1, min(WIDTH, int(BURST_SECONDS / one))), sizes=self._sizes)
        if plan is None:
            return None
        bucket = self._ladder.choose(plan, self._ladder.buckets)
        assert bucket is not None, "the largest bucket holds every plan"
        tokens, yielded = self._yield(plan)
        num_steps = 1 if bucket.width == 1 else int(yielded.max())
        self._now += num_steps * self._cost.seconds(bucket)
        self._steps += num_steps
        for slot in plan.slots[yielded > 0].tolist():
            self._first.setdefault(self._slots[slot], self._now)
        self._sums["tokens"] += num_steps * bucket.num_tokens
        self._sums["padding_tokens"] += num_steps * (bucket.num_tokens - plan.num_tokens)
        self._sums["ended_tokens"] += num_steps * plan.num_decode - int(yielded[: plan.num_decode].sum())
        self._sums["rows"] += num_steps * bucket.num_rows
        self._sums["padding_rows"] += num_steps * (bucket.num_rows - plan.num_rows)
        return plan, StepOutput(tokens, yielded)

    def _yield(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the device would: i32[R, Y], i32[R]. A request that has ended yields nothing."""
        for admission in plan.admissions:
            self._slots[admission.slot] = int(admission.request.request_id)
        tokens = np.full((plan.num_rows, plan.row_tokens), 9, np.int32)
        yielded = np.zeros(plan.num_rows, np.int32)
        for row, (slot, most) in enumerate(zip(plan.slots.tolist(), plan.max_new.tolist(), strict=True)):
            index = self._slots[slot]
            yielded[row] = count = min(most, self._left[index])
            self._left[index] -= count
            if count and not self._left[index] and self._workload.ends_by_token:
                tokens[row, count - 1] = STOP
        return tokens, yielded


def measure(device: Device, ladder: BucketLadder, cuts: bool, seeds: int) -> dict[str, Any]:
    """Returns medians over the seeds for each workload."""
    result = {}
    for workload in workloads(device):
        replays = [Replayer(device, workload, ladder, cuts, seed).run() for seed in range(seeds)]
        result[workload.name] = {
            "padding_share": statistics.median(replay.padding.share for replay in replays),
            "ended_share": statistics.median(replay.padding.ended_share for replay in replays),
            "padding_rows_share": statistics.median(
                replay.padding.padding_rows / replay.padding.rows for replay in replays
            ),
            "seconds": statistics.median(replay.seconds for replay in replays),
            "ttft_seconds": statistics.median(replay.ttft for replay in replays),
            "steps": statistics.median(replay.steps for replay in replays),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of lengths and arrivals")
    args = parser.parse_args()
    host = machine()
    results = []
    for device in DEVICES:
        names = [workload.name for workload in workloads(device)]
        print(f"\n{device.name}: padding (tokens of ended rows), seconds, mean ms to the first token\n")
        print(f"| ladder | programs | {' | '.join(names)} |")
        print("|---" * (2 + len(names)) + "|")
        for name, ladder in ladders(device).items():
            for cuts in (False, True):
                by_workload = measure(device, ladder, cuts, args.seeds)
                cells = [
                    f"{one['padding_share']:.1%} ({one['ended_share']:.1%}), {one['seconds']:.3g} s, "
                    f"{1e3 * one['ttft_seconds']:.3g} ms"
                    for one in by_workload.values()
                ]
                label = f"{name}, cut" if cuts else name
                print(f"| {label} | {len(ladder.buckets)} | {' | '.join(cells)} |", flush=True)
                results.append(
                    {
                        "device": device.name,
                        "ladder": name,
                        "cuts": cuts,
                        "rows": sorted({bucket.num_rows for bucket in ladder.buckets if bucket.is_decode}),
                        "tokens": sorted({bucket.num_tokens for bucket in ladder.buckets if not bucket.is_decode}),
                        "programs": len(ladder.buckets),
                        "workloads": by_workload,
                    }
                )
    about = {
        "seeds": args.seeds,
        "devices": [asdict(device) for device in DEVICES],
        "workloads": {device.name: [asdict(workload) for workload in workloads(device)] for device in DEVICES},
    }
    path = write_record("buckets", host, about | {"results": results})
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
