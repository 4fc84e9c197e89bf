"""Runs vLLM's build for CPUs as a worker: JSON requests on stdin, one JSON answer a line on stdout.

It runs in the environment of `make fixtures-vllm` (Python 3.11), and imports nothing of this repository.
Requests: `{"load": DIR, "threads": N, "dtype": D, "context": T, "requests": R}` reads the checkpoint in DIR and answers
with versions and settings; `{"prompts": [[id, ...], ...], "max_tokens": [N, ...]}` generates greedily, end-of-text
ignored, and answers with seconds, mean seconds to the first token and the tokens of each prompt.
"""

import json
import os
import sys
import time
from typing import Any

# vLLM writes to stdout while it loads; the answers have the real one for themselves.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch  # noqa: E402
import vllm  # noqa: E402


def generate(llm: Any, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in max_tokens
    ]
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    waits = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
    return {
        "seconds": seconds,
        "first_token_seconds": sum(waits) / len(waits) if waits else float("nan"),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def main() -> None:
    llm: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            torch.set_num_threads(request["threads"])
            settings = {
                "dtype": request["dtype"],
                "max_model_len": request["context"],
                "max_num_seqs": request["requests"],
                "enable_prefix_caching": False,
            }
            llm = vllm.LLM(request["load"], skip_tokenizer_init=True, disable_log_stats=False, **settings)
            answer: dict[str, Any] = {
                "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
                "settings": settings,
            }
        else:
            answer = generate(llm, request["prompts"], request["max_tokens"])
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
