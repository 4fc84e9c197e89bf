"""Measures the host's work between two decode steps, without a device: schedule, choose a bucket, pack, update.

Every request has its own prompt of 512 tokens, and all of them decode. Outputs lag one step behind, as in the
engine. `streaming` requests are reported token by token, the others only at their end. To add a request means to
make and queue it, and includes its share of the step that admits it (hashing its pages, taking a slot). This prints
a table and writes benchmarks/results/host_step-DATE-COMMIT.json.

    python -m benchmarks.host_step [--steps 400]
"""

import argparse
import gc
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm.core.kv_cache import GroupSize, KVCache
from jaxvllm.core.page_pool import pages_for
from jaxvllm.core.policy import POLICIES
from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.slots import SlotTable
from jaxvllm.core.step_plan import StepOutput, StepPlan
from jaxvllm.runtime.batch import pack
from jaxvllm.runtime.buckets import BucketLadder, powers_of_two
from jaxvllm.runtime.slot_fields import SlotSizes

NUM_RUNNING = (32, 64, 128, 256, 512, 1024)
PROMPT_TOKENS = 512
PAGE_SIZE = 16
BUDGET = 2048  # tokens a step
WARM_UP = 50
DECODE_STEPS_BETWEEN = 3  # additions; the quickest is the cost of an admitting step without its new request

# ../shared/PEERS.md of 2026-11: the scheduler of vLLM 0.33 (schedule + update, prompts of 512, no model), measured
# there on a machine of this kind and not in this run.
VLLM_STEP_MS = {32: 0.56, 256: 4.9, 1024: 17.0}
VLLM_ADD_MS = 0.44


@dataclass(frozen=True)
class Measured:
    """The results of one size: milliseconds of each decode step, and microseconds to add each request."""

    num_running: int
    streaming: bool
    step_ms: list[float]
    add_us: list[float]


def requests(count: int, max_tokens: int, seed: int) -> list[Request]:
    """Makes requests that share no prefix, end only at their limit, and look for one stop id."""
    prompts = np.random.default_rng(seed).integers(0, 32_000, (count, PROMPT_TOKENS), np.int32)
    params = SamplingParams(max_tokens=max_tokens)
    return [
        Request(
            asked=GenerationRequest(f"request-{index}", Prompt(None, prompt), params),
            seed=index,
            stop_token_ids=(32_001,),
            limit=PROMPT_TOKENS + max_tokens,
            key=QueueKey(0, index),
        )
        for index, prompt in enumerate(prompts)
    ]


def measure(num_running: int, streaming: bool, steps: int) -> Measured:
    """Fills an engine's host side with `num_running` requests, and times `steps` decode steps."""
    max_tokens = (
        WARM_UP + steps + (1 + DECODE_STEPS_BETWEEN) * num_running + 2
    )  # the first ones decode while the others are added
    max_model_len = PROMPT_TOKENS + max_tokens
    budget = max(BUDGET, num_running + PROMPT_TOKENS)
    cache = KVCache(
        [GroupSize(1 + num_running * pages_for(max_model_len, PAGE_SIZE))],
        num_slots=num_running,
        max_model_len=max_model_len,
        page_size=PAGE_SIZE,
        max_chunk=budget,
    )
    scheduler = Scheduler(SlotTable(num_running, max_model_len), cache, POLICIES["v1"], budget)
    sizes = SlotSizes(num_running, cache.max_pages, PAGE_SIZE, vocab_size=32_000, windows=(None,))
    ladder = BucketLadder.build(powers_of_two(8, num_running), powers_of_two(16, scheduler.max_num_batched_tokens))
    tokens, counts = np.full((num_running, 1), 7, np.int32), np.ones(num_running, np.int32)

    def dispatch() -> StepPlan:
        plan = scheduler.schedule()
        assert plan is not None, "every request decodes to the end of the measurement"
        bucket = ladder.choose(plan, ladder.buckets)
        assert bucket is not None, "the largest bucket holds every plan"
        pack(plan, bucket, sizes)
        return plan

    def collect(plan: StepPlan) -> None:
        scheduler.update(plan, StepOutput(tokens[: plan.num_rows], counts[: plan.num_rows]))

    # A request is added when the one before it runs, so that each admitting step admits only one.
    add_us = []
    previous: StepPlan | None = None
    for request in requests(num_running, max_tokens, seed=num_running):
        start = time.perf_counter()
        scheduler.add(request, watched=streaming)
        added = time.perf_counter() - start
        seconds = []
        for _ in range(1 + DECODE_STEPS_BETWEEN):
            start = time.perf_counter()
            plan = dispatch()
            seconds.append(time.perf_counter() - start)
            if previous is not None:
                collect(previous)
            previous = plan
        add_us.append(1e6 * (added + seconds[0] - min(seconds[1:])))

    step_ms = []
    assert previous is not None
    gc.collect()
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        plan = dispatch()
        collect(previous)
        step_ms.append(1000 * (time.perf_counter() - start))
        previous = plan
        assert plan.num_decode == num_running
    scheduler.check_invariants()
    return Measured(num_running, streaming, step_ms[WARM_UP:], add_us)


def slope_us(results: list[Measured]) -> float:
    """Returns the microseconds that one more running request adds to a step: least squares through the medians."""
    sizes = [result.num_running for result in results]
    medians = [1000 * statistics.median(result.step_ms) for result in results]
    return statistics.linear_regression(sizes, medians).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="measured decode steps a size, after 50 to warm up")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")

    device = machine()
    results = {kind: [measure(count, kind, args.steps) for count in NUM_RUNNING] for kind in (False, True)}
    print(f"{device['cpu']}, load average {device['load_average_at_start']:.2f}")
    print(
        f"host milliseconds a decode step, median (range) and mean of {args.steps}; microseconds to add one request\n"
    )
    print("| running | a step | mean | a step, streaming | mean | add, us | vLLM 0.33's step * |")
    print("|---|---|---|---|---|---|---|")
    for plain, streaming in zip(results[False], results[True], strict=True):
        steps = " | ".join(f"{spread(r.step_ms, 3)} | {statistics.fmean(r.step_ms):.3f}" for r in (plain, streaming))
        peer = VLLM_STEP_MS.get(plain.num_running, "")
        print(f"| {plain.num_running} | {steps} | {spread(plain.add_us, 0)} | {peer} |")
    slopes = {kind: slope_us(series) for kind, series in results.items()}
    print(f"\na further running request costs {slopes[False]:.2f} us a step, {slopes[True]:.2f} us streaming")
    print(f"* quoted from ../shared/PEERS.md, not measured in this run; vLLM adds a request in {VLLM_ADD_MS} ms")

    record = {
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "prompt_tokens": PROMPT_TOKENS,
        "page_size": PAGE_SIZE,
        "slope_us": slopes[False],
        "slope_us_streaming": slopes[True],
        "quoted_not_measured": {"vllm_0.33_step_ms": VLLM_STEP_MS, "vllm_0.33_add_ms": VLLM_ADD_MS},
        "results": [asdict(r) | summary(r) for series in results.values() for r in series],
    }
    path = write_record("host_step", device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


def summary(result: Measured) -> dict[str, float]:
    return {
        "step_ms_median": statistics.median(result.step_ms),
        "step_ms_mean": statistics.fmean(result.step_ms),
        "add_us_median": statistics.median(result.add_us),
    }


if __name__ == "__main__":
    main()
