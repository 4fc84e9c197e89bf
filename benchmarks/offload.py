"""Measures what host memory beside the page pool brings: prompts that come again when the pool has forgotten them.

There are so many prompts that all of their pages are four times as many as the pool holds. Two engines answer all of
them with one token, round by round: one computes each prompt again, the other has `kv_connector` host. Rounds alternate
between the two. This prints the seconds of a round after the first, which fills the memory, and writes
benchmarks/results/offload-DATE-COMMIT.json.

    python -m benchmarks.offload [--rounds 7] [--prompt-tokens 512]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.qwen3 import MODEL_S, write_model
from benchmarks.result_files import ROOT, machine, spread, write_record
from jaxvllm import LLM, SamplingParams

NUM_PROMPTS = 32
TIMES_THE_POOL = 4
PAGE_SIZE = 16
ONE = SamplingParams(temperature=0, max_tokens=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    args = parser.parse_args()
    device = machine()
    # Each prompt has a page more than its full ones, for its last token.
    num_pages = NUM_PROMPTS * (args.prompt_tokens // PAGE_SIZE + 1) // TIMES_THE_POOL
    common: dict[str, Any] = dict(
        load_format="dummy",
        dtype="float32",
        max_model_len=args.prompt_tokens + PAGE_SIZE,
        max_num_seqs=4,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        warm_up="full",
        speculation=False,
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, MODEL_S["vocab_size"], (NUM_PROMPTS, args.prompt_tokens + 1)).tolist()
    options: dict[str, dict[str, Any]] = {
        "computed again": {},
        "host memory": {"kv_transfer_config": json.dumps({"kv_connector": "host"})},
    }
    seconds: dict[str, list[float]] = {name: [] for name in options}
    answers: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), MODEL_S)
        engines = {kind: LLM(name, **common, **more) for kind, more in options.items()}
        for number in range(args.rounds + 1):
            for kind, llm in engines.items():
                start = time.perf_counter()
                outputs = llm.generate(prompts, ONE, use_tqdm=False)
                if number:  # the first fills the memory
                    seconds[kind].append(time.perf_counter() - start)
                got = [output.outputs[0].token_ids for output in outputs]
                assert answers.setdefault("all", got) == got, f"{kind} changed a token"
        [replica] = engines["host memory"].engine.replicas
        assert replica.traffic is not None
        pages = {"saved": replica.traffic.num_saved_pages, "loaded": replica.scheduler.num_loaded_pages}
        for llm in engines.values():
            llm.close()
    for kind, values in seconds.items():
        print(f"{kind:15} {spread(values, 3)} s for {NUM_PROMPTS} prompts of {args.prompt_tokens} tokens")
    again, kept = (statistics.median(values) for values in seconds.values())
    print(f"{again / kept:.2f} times as fast; pages {pages}")
    found = {"options": vars(args), "num_pages": num_pages, "seconds": seconds, "ratio": again / kept, "pages": pages}
    print(write_record("offload", device, found).relative_to(ROOT))


if __name__ == "__main__":
    main()
