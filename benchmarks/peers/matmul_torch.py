"""Multiplies by torch (oneDNN) on a CPU as a worker: JSON requests on stdin, one answer each on stdout.

It is a process of its own and imports nothing of this repository, so that any environment with torch can run it. A
request has the shape of a product, `{"rows": .., "out": .., "in": .., "dtype": ".."}`, for how many `seconds` it is
repeated, and how many `threads` it may use. The answer is the shortest time in seconds, and torch's version.
"""

import json
import sys
import time

import torch


def shortest(request: dict[str, float | str]) -> float:
    """Returns the seconds of the shortest of all repetitions."""
    torch.set_num_threads(int(request["threads"]))
    dtype = getattr(torch, str(request["dtype"]))
    matrix = torch.randn(int(request["out"]), int(request["in"])).to(dtype)
    x = torch.randn(int(request["rows"]), int(request["in"])).to(dtype)
    best, end = float("inf"), time.perf_counter() + float(request["seconds"])
    with torch.no_grad():
        torch.nn.functional.linear(x, matrix)
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.nn.functional.linear(x, matrix)
            best = min(best, time.perf_counter() - start)
    return best


for line in sys.stdin:
    print(json.dumps({"seconds": shortest(json.loads(line)), "torch": torch.__version__}), flush=True)
