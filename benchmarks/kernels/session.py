"""Measures ragged paged attention on this device: time, bandwidth and FLOP/s beside measured ceilings and peers.

Each case runs our kernel as `auto` picks it, the XLA reference, and the peers that the machine has, on the same shapes
and types of random data. Each is compared with attention in float32 first, and not timed when it is wrong. A layer's
call counts as a whole: the metadata of the rows (once for all layers), the write of this step's keys and values if
there is one, and any copies that XLA adds. Ceilings are measured first, on the same device.

This writes benchmarks/results/kernels-DATE-COMMIT.json after every case, and prints a Markdown table at the end. The
cases that have goals come first, so that a run cut short by --minutes, or by the end of a lease, has them.

    python -m benchmarks.kernels [--cases REGEX] [--dtype bfloat16] [--minutes 9]
"""

import os

# This must come before jax is imported, because peers in another process need memory of the same card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import gc
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.kernels.report import CaseResult, Goal, markdown
from benchmarks.kernels.worker import TorchContender, TorchWorker
from benchmarks.peers import attention_gather
from benchmarks.peers.attention_cudnn import CudnnContiguous, CudnnPaged
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.bench.kernels.ceilings import measure_ceilings
from jaxvllm.bench.kernels.contender import MAX_ERROR, Contender, LayerOutcome, relative_error
from jaxvllm.bench.kernels.counts import Work
from jaxvllm.bench.kernels.device import describe, package_versions
from jaxvllm.bench.kernels.paged import OurAttention, PagedContender
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention.cases import CASES, SERVING, RaggedCase

GOALS_FIRST = tuple(
    f"{name}-q32-d128"
    for name in ("decode-64x4096", "decode-256x4096", "decode-8x32768", "prefill-2048", "prefill-8192")
)


def chosen(pattern: str | None) -> list[RaggedCase]:
    """Returns the serving cases, or all cases whose name matches `pattern`, with those that have goals first."""
    cases = SERVING if pattern is None else [case for case in (*SERVING, *CASES) if re.search(pattern, case.name)]

    def place(case: RaggedCase) -> tuple[int, bool, bool]:
        first = GOALS_FIRST.index(case.name) if case.name in GOALS_FIRST else len(GOALS_FIRST)
        return first, Goal.of(case) is None, not case.name.endswith("-q32-d128")

    return sorted(cases, key=place)


def contenders(device: jax.Device, dtype: jnp.dtype, worker: TorchWorker) -> list[Contender]:
    """Returns the contenders, ours first."""
    backend = Backend.of_device("auto", device, dtype)
    ours = PagedContender(f"ours ({backend.kind})", OurAttention(backend), backend, device)
    reference = PagedContender("reference", OurAttention(REFERENCE), REFERENCE, device)
    return [
        ours,
        *([] if backend == REFERENCE else [reference]),
        PagedContender("XLA gather", attention_gather.attend, REFERENCE, device),
        CudnnPaged(device),
        CudnnContiguous(device),
        TorchContender("torch SDPA, contiguous KV", "sdpa", worker, device),
        TorchContender("FlashInfer", "flashinfer", worker, device),
        TorchContender("vLLM FlashAttention", "vllm", worker, device),
    ]


def measure(case: RaggedCase, dtype: jnp.dtype, field: Sequence[Contender]) -> Iterator[tuple[str, LayerOutcome]]:
    """Yields every contender's outcome. An exception is an outcome, too."""
    for contender in field:
        try:
            outcome = contender.run(case, dtype)
        except NotImplementedError as error:
            outcome = LayerOutcome.without(_first_line(error))
        except Exception as error:
            outcome = LayerOutcome.without(f"{type(error).__name__}: {_first_line(error)}")
        gc.collect()  # frees arrays that an exception's frames held
        yield contender.name, outcome


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or "no message")[:300]


def agreeing(outcomes: dict[str, LayerOutcome], dtype: jnp.dtype) -> dict[str, LayerOutcome]:
    """Marks ours as failed when the reference had another result at full size."""
    name, outcome = next(iter(outcomes.items()))
    reference = outcomes.get("reference")
    if reference is None or reference.outputs is None or outcome.outputs is None:
        return outcomes
    difference = relative_error(outcome.outputs, reference.outputs)
    details = {**outcome.details, "difference_from_reference": difference}
    if difference <= MAX_ERROR[dtype]:
        return outcomes | {name: replace(outcome, details=details)}
    problem = f"differs from the reference by {difference:.1e} at full size"
    return outcomes | {name: replace(outcome, timing=None, problem=problem, details=details)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", metavar="REGEX", help="of all cases, the small ones of the tests too")
    parser.add_argument("--dtype", choices=[dtype.name for dtype in MAX_ERROR], help="bfloat16; on a CPU float32")
    parser.add_argument("--minutes", type=float, help="start no further case after so many")
    args = parser.parse_args()
    start = time.monotonic()
    cases = chosen(args.cases)
    if not cases:
        parser.error(f"--cases {args.cases} is found in no case's name")

    host, device = machine(), jax.devices()[0]
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    about = host | describe(device)
    print(f"{device.device_kind} ({device.client.platform_version.splitlines()[0]}), {host['cpu']}")
    ceilings = measure_ceilings(device, dtype)
    print(f"copies {ceilings.copy / 1e9:.4g} GB/s, multiplies {dtype} at {ceilings.matmul / 1e12:.4g} TFLOP/s\n")

    results: list[CaseResult] = []
    worker = TorchWorker()
    field = contenders(device, dtype, worker)
    versions = package_versions()

    def save() -> Path:
        record = {
            "versions": versions,
            "dtype": dtype.name,
            "ceilings": {"copy_bytes_per_second": ceilings.copy, "matmul_flops_per_second": ceilings.matmul},
            "cases_not_measured": [case.name for case in cases[len(results) :]],
            "results": [result.record() for result in results],
        }
        return write_record("kernels", about, record)

    try:
        for contender in field:
            versions |= contender.versions()
        path = save()
        for case in cases:
            if args.minutes is not None and time.monotonic() - start > 60 * args.minutes:
                print(f"{args.minutes:g} minutes are over: {len(cases) - len(results)} cases are not measured")
                break
            outcomes = agreeing(dict(measure(case, dtype, field)), dtype)
            results.append(CaseResult(case, Work.of(case, dtype), ceilings, outcomes))
            print(results[-1].line(), flush=True)
            save()
    finally:
        worker.close()
    print(f"\n{markdown(results)}")
    print(f"\nwritten to {path.relative_to(ROOT)}")
