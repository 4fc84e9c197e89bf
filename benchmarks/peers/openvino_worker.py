"""Runs OpenVINO GenAI's continuous batching as a worker: JSON requests on stdin, one JSON answer a line on stdout.

It runs in the environment of `make .openvino/.stamp` (Python 3.11), and imports nothing of this repository.
Requests: `{"load": DIR, "threads": N, "dtype": D, "context": T, "requests": R}` reads the export in DIR and answers
with versions and settings; `{"prompts": [[id, ...], ...], "max_tokens": [N, ...]}` generates greedily, end-of-text
ignored, and answers with seconds, mean seconds to the first token and the tokens of each prompt.
"""

import json
import os
import sys
import time
from typing import Any

# Libraries write to stdout while they load; the answers have the real one for themselves.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402

CACHE_GB = 4


def load(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the pipeline and its settings. Keys and values have the engine's own default, except in float32."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = request["requests"]
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[request["dtype"]],
        "INFERENCE_NUM_THREADS": request["threads"],
    }
    if request["dtype"] == "float32":
        properties["KV_CACHE_PRECISION"] = "f32"
    pipeline = genai.ContinuousBatchingPipeline(request["load"], scheduler, "CPU", properties)
    return pipeline, properties | {"cache_size": CACHE_GB, "max_num_batched_tokens": scheduler.max_num_batched_tokens}


def generate(pipeline: Any, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    start = time.perf_counter()
    waiting = {}
    for number, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
        config = genai.GenerationConfig(do_sample=False, max_new_tokens=count, ignore_eos=True)
        config.set_eos_token_id(0)  # the export has none, and one must be named to be ignored
        waiting[number] = pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)
    handles, first = list(waiting.values()), []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for number in [number for number, handle in waiting.items() if handle.can_read()]:
            del waiting[number]
            first.append(time.perf_counter() - start)
    seconds = time.perf_counter() - start
    tokens = [list(handle.read_all()[0].generated_ids) for handle in handles]
    return {"seconds": seconds, "first_token_seconds": sum(first) / len(first), "tokens": tokens}


def main() -> None:
    pipeline: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "load" in request:
            pipeline, settings = load(request)
            versions = {"openvino": openvino.__version__, "openvino-genai": genai.__version__}
            answer: dict[str, Any] = {"versions": versions, "settings": settings}
        else:
            answer = generate(pipeline, request["prompts"], request["max_tokens"])
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
