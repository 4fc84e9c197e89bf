"""Measures how long prompts disturb running answers: with one server for both, and with a server for each.

Streams run, and then long prompts come at once. This prints the time between two chunks of the streams (inter-token
latency: median, 99th percentile and longest) and the time to the first token of the long prompts, for one server, for
two equal ones behind a router, and for a prefill and a decode server behind a router. All servers share this machine's
cores. A last round, in which this script sends the two halves of long requests itself, shows when each half ends.

It writes benchmarks/results/disaggregation-DATE-COMMIT.json and, with matplotlib, a timeline of the last rounds beside
it.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.qwen3 import MODEL_S, write_model
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.router.proxy import PREFILL_PARAMS

MODEL = MODEL_S | {"max_position_embeddings": 2048}
OUTPUT_TOKENS = 150
LISTENING = re.compile(rb"http://127\.0\.0\.1:(\d+)")


@contextmanager
def process(command: str, *arguments: str) -> Iterator[str]:
    """Runs a server or a router, and gives its URL once it is ready."""
    words = [sys.executable, "-m", "jaxvllm", command, "--port", "0", *arguments]
    running = subprocess.Popen(words, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ | {"JAXVLLM_KV_SECRET": "s"})
    try:
        assert running.stderr is not None
        while (match := LISTENING.search(running.stderr.readline())) is None:
            assert running.poll() is None, f"{command} has ended"
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
    """Returns the times of all chunks of one answer, the time of asking first."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times = [time.perf_counter()]
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


@dataclass(frozen=True)
class Round:
    """Seconds since the long prompts came: of the chunks of each stream, and of what happened to each long prompt.

    That is: it was asked, perhaps its first half was answered, and its first token came.
    """

    streams: list[list[float]]
    prompts: list[list[float]]

    @property
    def gaps(self) -> list[float]:
        """The seconds between two chunks of a stream, if the second came after the long prompts."""
        pairs = (zip(times, times[1:], strict=False) for times in self.streams)
        return [later - before for of_one in pairs for before, later in of_one if later > 0]

    @property
    def first_tokens(self) -> list[float]:
        return [times[-1] - times[0] for times in self.prompts]


async def halves(client: httpx.AsyncClient, prefill: str, decode: str, prompt: list[int]) -> list[float]:
    """Returns the times at which a long prompt was asked, its first half was answered, and its first token came."""
    body = {"prompt": prompt, "ignore_eos": True, "temperature": 0, "max_tokens": 1}
    asked = time.perf_counter()
    answer = await client.post(f"{prefill}/v1/completions", json=body | {"kv_transfer_params": PREFILL_PARAMS})
    answer.raise_for_status()
    computed = time.perf_counter()
    given = body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}
    answer = await client.post(f"{decode}/v1/completions", json=given)
    answer.raise_for_status()
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], "no page has come"
    return [asked, computed, time.perf_counter()]


async def disturbed(url: str, args: argparse.Namespace, seed: int, apart: Sequence[str] = ()) -> Round:
    """Runs the streams, and long prompts beside them. `apart`: the servers for the two halves of the long prompts."""
    rng = np.random.default_rng(seed)
    short = rng.integers(0, MODEL["vocab_size"], (args.streams, 32)).tolist()
    long = rng.integers(0, MODEL["vocab_size"], (args.prompts, args.prompt_tokens)).tolist()
    async with httpx.AsyncClient(timeout=None) as client:
        running = [asyncio.create_task(stream(client, url, prompt, OUTPUT_TOKENS)) for prompt in short]
        await asyncio.sleep(0.5)
        came = time.perf_counter()
        if apart:
            of_prompts = await asyncio.gather(*(halves(client, apart[0], apart[1], prompt) for prompt in long))
        else:
            of_prompts = await asyncio.gather(*(stream(client, url, prompt, 1) for prompt in long))
        of_streams = [(await task)[1:] for task in running]
    streams = [[at - came for at in times] for times in of_streams]
    return Round(streams, [[at - came for at in times] for times in of_prompts])


def draw(rounds: dict[str, Round], title: str, path: Path) -> None:
    """Draws when the tokens of the streams came, and what the long prompts waited for, one panel for each setup."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rounds), 1, sharex=True)
    for axes, (name, one) in zip(panels, rounds.items(), strict=True):
        for row, times in enumerate(one.streams):
            axes.plot(times, [row] * len(times), "|", color="#4269d0", markersize=9, label=None if row else "a token")
        for number, times in enumerate(one.prompts):
            row, (asked, *computed, first) = len(one.streams) + number, times
            for begin, end, color, label in (
                (asked, computed[0] if computed else first, "#efb118", "a long prompt is computed, or waits for that"),
                (computed[0] if computed else first, first, "#ff725c", "its pages cross, and its first token is made"),
            ):
                axes.barh(row, end - begin, left=begin, height=0.6, color=color, label=None if number else label)
        axes.set_title(name, loc="left")
        axes.set_yticks([])
        axes.invert_yaxis()
    last = max(max(times) for one in rounds.values() for times in one.prompts)
    panels[-1].set_xlim(-0.3, 1.1 * last)
    panels[-1].set_xlabel("seconds since the long prompts came")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("streams", 6), ("prompts", 6), ("prompt-tokens", 1500), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device = machine()
    found: dict[str, Any] = {}
    timelines: dict[str, Round] = {}
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
                urls = [stack.enter_context(process("serve", *server, *more)) for more in options]
                url = urls[0]
                if len(urls) == 2:
                    flags = ["--prefill", urls[0], "--decode", urls[1]]
                    if name == "two equal servers":
                        flags = ["--backend", urls[0], "--backend", urls[1]]
                    url = stack.enter_context(process("router", *flags))
                rounds = [asyncio.run(disturbed(url, args, seed)) for seed in range(args.rounds + 1)][1:]
                apart = urls if name == "prefill and decode" else ()
                timelines[name] = asyncio.run(disturbed(url, args, args.rounds + 1, apart))
            gaps = [gap for one in rounds for gap in one.gaps]
            firsts = [seconds for one in rounds for seconds in one.first_tokens]
            found[name] = {
                "itl_ms": {
                    "median": 1e3 * statistics.median(gaps),
                    "p99": 1e3 * float(np.percentile(gaps, 99)),
                    "max": 1e3 * max(gaps),
                },
                "ttft_ms_of_long": {"median": 1e3 * statistics.median(firsts), "max": 1e3 * max(firsts)},
            }
            print(name, json.dumps(found[name]), flush=True)
    lasts = {name: asdict(one) for name, one in timelines.items()}
    path = write_record("disaggregation", device, {"options": vars(args), "setups": found, "last_rounds": lasts})
    print(path.relative_to(ROOT))
    if find_spec("matplotlib") is not None:
        draw(timelines, f"{device['cpu']}, {path.stem}", path.with_suffix(".png"))


if __name__ == "__main__":
    main()
