"""Measures how evenly `--enable-eplb` shares the work of experts out, and how long the host takes for a layer.

Loads fall as a power of an expert's rank, times a random factor. Experts begin in order, each in a slot of its own, as
they are loaded. They are placed once by these loads, and a second time after the loads have drifted. The figure is the
mean load of a device over that of the busiest one: with 1, no device waits. Only the seconds depend on the machine.
This prints a table and writes benchmarks/results/expert_balance-DATE-COMMIT.json.

    python -m benchmarks.expert_balance [--samples 8]
"""

import argparse
import time
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm.core.expert_placement import NOTHING, Ints, balanced, device_loads

EXPERTS, REDUNDANT, DEVICES = 256, 32, (8, 16, 32)  # DeepSeek V3's experts
EXPONENT, NOISE, DRIFT = 0.7, 0.5, 0.2


@dataclass(frozen=True)
class Sample:
    """The balance of devices as loaded, placed by load, after the loads have drifted, and placed again."""

    loaded: float
    placed: float
    drifted: float
    placed_again: float
    changed_slots: int  # of the second placement
    seconds: float  # of the host, for the first placement


def balance(held: Ints, loads: NDArray[np.float64], num_devices: int) -> float:
    """Returns the mean load of a device over that of the busiest."""
    each = device_loads(held, loads, num_devices)
    return float(each.mean() / each.max())


def sample(num_devices: int, seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    ranks = rng.permutation(EXPERTS) + 1
    loads = ranks**-EXPONENT * rng.lognormal(0, NOISE, EXPERTS) * 1e4
    held = np.full(EXPERTS + REDUNDANT, NOTHING, np.int32)
    held[:EXPERTS] = np.arange(EXPERTS)
    start = time.perf_counter()
    placed = balanced(held, loads, num_devices)
    seconds = time.perf_counter() - start
    later = loads * rng.lognormal(0, DRIFT, EXPERTS)
    again = balanced(placed, later, num_devices)
    return Sample(
        loaded=balance(held, loads, num_devices),
        placed=balance(placed, loads, num_devices),
        drifted=balance(placed, later, num_devices),
        placed_again=balance(again, later, num_devices),
        changed_slots=int((placed != again).sum()),
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="measures how evenly experts are placed")
    parser.add_argument("--samples", type=int, default=8)
    samples = parser.parse_args().samples
    device = machine()
    results = {count: [sample(count, seed) for seed in range(samples)] for count in DEVICES}
    print(f"{EXPERTS} experts, {REDUNDANT} redundant ones: mean over busiest device, median (range) of {samples}\n")
    print("| devices | as loaded | placed by load | after a drift | placed again | slots changed | ms a layer |")
    print("|---|---|---|---|---|---|---|")
    for count, found in results.items():
        rows = [asdict(one) for one in found]
        cells = [spread([row[name] for row in rows], 2) for name in ("loaded", "placed", "drifted", "placed_again")]
        slots, ms = spread([one.changed_slots for one in found], 0), spread([one.seconds * 1e3 for one in found])
        print(f"| {count} | {' | '.join(cells)} | {slots} | {ms} |")
    record = {
        "experts": EXPERTS,
        "redundant": REDUNDANT,
        "loads": {"exponent": EXPONENT, "noise": NOISE, "drift": DRIFT},
        "results": [{"devices": count, "samples": [asdict(one) for one in found]} for count, found in results.items()],
    }
    path = write_record("expert_balance", device, record)
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
