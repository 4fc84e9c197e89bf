"""Runs causal attention of torch on a CPU as a worker: one line of JSON in, one out.

It is a process of its own and imports nothing of this repository, as torch is in another environment than jax. A
request has the sizes of one row: `query_len` and `kv_len` tokens, `num_heads`, `num_kv_heads`, `head_size` and `dtype`.
The answer has the seconds of the fastest of some calls of `scaled_dot_product_attention`, and which way of calling it
that was: it takes fewer heads of keys than of queries (`grouped`), or copies of them made before (`repeated`).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

SECONDS = 0.7  # for each way


def fastest(call: Callable[[], Any]) -> float:
    call()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def answer(request: dict[str, Any]) -> dict[str, Any]:
    H, K, D = (request[name] for name in ("num_heads", "num_kv_heads", "head_size"))
    dtype = getattr(torch, request["dtype"])
    q = torch.randn(1, H, request["query_len"], D, dtype=dtype)
    k, v = (torch.randn(1, K, request["kv_len"], D, dtype=dtype) for _ in range(2))
    repeated = [x.repeat_interleave(H // K, dim=1) for x in (k, v)]
    causal = request["query_len"] > 1
    ways: dict[str, Callable[[], Any]] = {
        "grouped": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        "repeated": lambda: scaled_dot_product_attention(q, *repeated, is_causal=causal),
    }
    seconds = {}
    for name, call in ways.items():
        seconds[name] = fastest(call)
    best = min(seconds, key=lambda name: seconds[name])
    return {"seconds": seconds[best], "way": best, "threads": torch.get_num_threads(), "torch": torch.__version__}


def main() -> None:
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
