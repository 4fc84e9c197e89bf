"""Measures the cost of HTTP and the second process: output tokens per second of 64 streams, and of the engine alone.

The embedded model answers 64 greedy prompts of 32 tokens in and 128 out, and ignores the end of text. Each round gives
the same new token ids to `LLM.generate` in this process and, as 64 concurrent streams, to `python -m jaxvllm.serve` in
another; the next round swaps their order. The reader is part of the cost, because it shares the cores, so it only
looks for the ends of events. This prints medians and ranges, and writes
benchmarks/results/server-overhead-DATE-COMMIT.json.

    python -m benchmarks.server_overhead [--rounds 9]
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import asyncio
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm import LLM, SamplingParams, __version__

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32, 128
VOCAB_SIZE = 2048  # of the embedded model
GOAL = 0.15
OPTIONS: dict[str, Any] = {
    "max_num_seqs": STREAMS,
    "max_num_batched_tokens": 512,
    "max_model_len": 256,
    "warm_up": "full",
}


def prompts(round_: int) -> list[list[int]]:
    """Returns the token ids of a round."""
    ids = np.random.default_rng(round_).integers(3, VOCAB_SIZE, (STREAMS, PROMPT_TOKENS))
    return [[int(token) for token in row] for row in ids]


def offline(llm: LLM, round_: int) -> float:
    """Runs a round in the offline engine, and returns output tokens per second."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts(round_), params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == STREAMS * OUTPUT_TOKENS
    return STREAMS * OUTPUT_TOKENS / seconds


async def streams(port: int, round_: int) -> tuple[float, int]:
    """Runs a round as streams, and returns output tokens per second and the number of events."""

    async def one(prompt: list[int]) -> int:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        read, events = b"", 0
        while data := await reader.read(65536):
            events += data.count(b"data: ")
            read = (read + data)[-64:]
        writer.close()
        assert b"[DONE]" in read, read
        return events

    start = time.perf_counter()
    events = await asyncio.gather(*map(one, prompts(round_)))
    return STREAMS * OUTPUT_TOKENS / (time.perf_counter() - start), sum(events)


@contextmanager
def served() -> Iterator[int]:
    """Runs a server, and yields its port."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    port = 8765
    with subprocess.Popen([sys.executable, "-m", "jaxvllm.serve", "--port", str(port), *flags]) as process:
        try:
            for _ in range(600):
                time.sleep(0.1)
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as response:
                        if response.status == 200:
                            break
                except OSError:
                    continue
            yield port
        finally:
            process.terminate()


def main() -> None:
    """Measures both and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, after one to warm up")
    args = parser.parse_args()
    device = machine()
    rates: dict[str, list[float]] = {"offline": [], "server": []}
    num_events = []
    with LLM(**OPTIONS) as llm, served() as port:
        for round_ in range(args.rounds + 1):
            for name in ("offline", "server") if round_ % 2 else ("server", "offline"):
                if name == "offline":
                    rate = offline(llm, round_)
                else:
                    rate, events = asyncio.run(streams(port, round_))
                    num_events.append(events)
                if round_:
                    rates[name].append(rate)
    # The ratio is taken round by round, because a busy moment of the machine slows both.
    cost = 1 - statistics.median(a / b for a, b in zip(rates["server"], rates["offline"], strict=True))
    print(f"{device['cpu']}, load average {device['load_average_at_start']:.2f}\n")
    print(f"median (range) of {args.rounds} rounds\n\n| engine | output tokens/s |\n|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {spread(values, 0)} |")
    print(f"\ncost {cost:.1%}, goal {GOAL:.0%}; {statistics.median(num_events):.0f} events a round")
    record = {
        "workload": {"streams": STREAMS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
        "options": OPTIONS,
        "tokens_per_second": rates,
        "cost": cost,
        "events": num_events,
        "versions": {
            "python": platform.python_version(),
            "jaxvllm": __version__,
            **{name: importlib.metadata.version(name) for name in ("jax", "fastapi", "uvicorn", "pyzmq", "msgspec")},
        },
    }
    print(f"\nwritten to {write_record('server-overhead', device, record).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
