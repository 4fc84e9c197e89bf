"""Measures how long prompts disturb running answers: with one server for both, and with a server for each.

Streams run, and then long prompts come at once. This prints the time between two chunks of the streams (inter-token
latency: median, 99th percentile and longest) and the time to the first token of the long prompts, for one server, for
two equal ones behind a router, and for a prefill and a decode server behind a router. All servers share this machine's
cores. It writes benchmarks/results/disaggregation-DATE-COMMIT.json.

    python -m benchmarks.disaggregation [--streams 6] [--prompts 6] [--prompt-tokens 1500] [--rounds 3]
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.cpu import MODEL_S
from benchmarks.provenance import ROOT, machine, write_record
from benchmarks.qwen3 import write_model

MODEL = MODEL_S | {"max_position_embeddings": 2048}
OUTPUT_TOKENS = 150
LISTENING = re.compile(rb"http://127\.0\.0\.1:(\d+)")


@contextmanager
def process(module: str, *arguments: str) -> Iterator[str]:
    """Runs a server or a router, and gives its URL once it is ready."""
    command = [sys.executable, "-m", module, "--port", "0", *arguments]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ | {"JAXVLLM_KV_SECRET": "s"})
    try:
        assert running.stderr is not None
        while (match := LISTENING.search(running.stderr.readline())) is None:
            assert running.poll() is None, f"{module} has ended"
        url = f"http://127.0.0.1:{match[1].decode()}"
        while True:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        yield url
    finally:
        running.terminate()
        running.wait()


async def stream(client: httpx.AsyncClient, url: str, prompt: list[int], num_tokens: int) -> list[float]:
    """The times of all chunks of one answer, the time of asking first."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times = [time.perf_counter()]
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


async def disturbed(url: str, args: argparse.Namespace, seed: int) -> tuple[list[float], list[float]]:
    """Seconds between chunks of the streams after the long prompts came, and to the first tokens of these."""
    rng = np.random.default_rng(seed)
    short = rng.integers(0, MODEL["vocab_size"], (args.streams, 32)).tolist()
    long = rng.integers(0, MODEL["vocab_size"], (args.prompts, args.prompt_tokens)).tolist()
    async with httpx.AsyncClient(timeout=None) as client:
        running = [asyncio.create_task(stream(client, url, prompt, OUTPUT_TOKENS)) for prompt in short]
        await asyncio.sleep(0.5)
        came = time.perf_counter()
        first = await asyncio.gather(*(stream(client, url, prompt, 1) for prompt in long))
        times = [await task for task in running]
    gaps = [later - before for one in times for before, later in zip(one[1:], one[2:], strict=False) if later > came]
    return gaps, [one[1] - one[0] for one in first]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("streams", 6), ("prompts", 6), ("prompt-tokens", 1500), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device = machine()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODEL)
        server = ["--model", directory, "--load-format", "dummy", "--dtype", "float32", "--warm-up", "full"]
        server += ["--max-model-len", "2048", "--max-num-seqs", "16", "--no-speculation"]
        roles = [json.dumps({"kv_connector": "peer", "kv_role": role}) for role in ("producer", "consumer")]
        setups: dict[str, list[list[str]]] = {
            "one server": [[]],
            "two equal servers": [[], []],
            "prefill and decode": [["--kv-transfer-config", role] for role in roles],
        }
        for name, options in setups.items():
            with ExitStack() as stack:
                urls = [stack.enter_context(process("jaxvllm.serve", *server, *more)) for more in options]
                url = urls[0]
                if len(urls) == 2:
                    flags = ["--prefill", urls[0], "--decode", urls[1]]
                    if name == "two equal servers":
                        flags = ["--backend", urls[0], "--backend", urls[1]]
                    url = stack.enter_context(process("jaxvllm.router", *flags))
                rounds = [asyncio.run(disturbed(url, args, seed)) for seed in range(args.rounds + 1)][1:]
            gaps, firsts = ([value for one in rounds for value in one[which]] for which in (0, 1))
            found[name] = {
                "itl_ms": {
                    "median": 1e3 * statistics.median(gaps),
                    "p99": 1e3 * float(np.percentile(gaps, 99)),
                    "max": 1e3 * max(gaps),
                },
                "ttft_ms_of_long": {"median": 1e3 * statistics.median(firsts), "max": 1e3 * max(firsts)},
            }
            print(name, json.dumps(found[name]), flush=True)
    print(write_record("disaggregation", device, {"options": vars(args), "setups": found}).relative_to(ROOT))


if __name__ == "__main__":
    main()
