"""Tells how long libtpu expects a whole decode step of few rows to take, without its attention.

Nothing runs: the steps of Qwen3-4B in bfloat16 are compiled for TPUs that are not here, in the environment .aot, as an
engine compiles them. The compiled program says how many cycles it expects each operation of XLA to take. Our attention
kernel has no such estimate, and reads the pages of as many rows as there are, however many a step has room for. It
prints a table and writes benchmarks/results/step-estimate-DATE-COMMIT.json.

    JAX_PLATFORMS=cpu .aot/bin/python -m benchmarks.step_estimate [CHIP ..]
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.quantized_estimate import CHIPS
from benchmarks.result_files import ROOT, machine, write_record
from benchmarks.states_estimate import cost_of
from jaxvllm.config import EngineConfig
from jaxvllm.planner.compile_worker import CompiledSteps
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.known_models import find_config
from jaxvllm.runtime.buckets import Bucket

MODEL = "Qwen3-4B"
ROWS = (1, 2, 8)


@dataclass(frozen=True)
class DecodeEstimate:
    """The cycles of a decode step with room for so many rows."""

    chip: str
    rows: int
    cycles: int


def estimates(chip: str) -> Iterator[DecodeEstimate]:
    config = EngineConfig(model=MODEL, max_num_seqs=max(ROWS), max_model_len=4096)
    steps = CompiledSteps(Deployment.of_config(config, find_config(MODEL)[1], chip))
    for num_rows in ROWS:
        text = steps.compiler.compile_begin(Bucket(num_rows, num_rows)).as_text()
        assert text is not None
        yield DecodeEstimate(chip, num_rows, cost_of(text).once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=CHIPS)
    chips, about, found = parser.parse_args().chips, machine(), list[DecodeEstimate]()
    print("| chip | rows | thousand cycles |\n|---|---|---|")
    for chip in chips:
        for estimate in estimates(chip):
            found.append(estimate)
            print(f"| {estimate.chip} | {estimate.rows} | {estimate.cycles / 1000:,.0f} |", flush=True)
    record = {"model": MODEL, "estimates": [asdict(estimate) for estimate in found]}
    print(f"\nwritten to {write_record('step-estimate', about, record).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
