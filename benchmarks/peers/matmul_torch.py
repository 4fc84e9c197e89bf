"""Multiplies by torch (oneDNN) on a CPU as a worker: JSON requests on stdin, one answer each on stdout.

It is a process of its own and imports nothing of this repository, so that any environment with torch can run it. A
request has the shape of a product, `{"rows": .., "out": .., "in": .., "dtype": ".."}`, for how many `seconds` it is
repeated, and whether the process has `one_core`, and its CPU time counts. The answer is the shortest time in seconds.
"""

import json
import os
import sys
import time

import torch


def shortest(request: dict[str, float | str]) -> float:
    """Returns the seconds of the shortest of all repetitions."""
    clock = time.process_time if request["one_core"] else time.perf_counter
    dtype = getattr(torch, str(request["dtype"]))
    matrix = torch.randn(int(request["out"]), int(request["in"])).to(dtype)
    x = torch.randn(int(request["rows"]), int(request["in"])).to(dtype)
    best = float("inf")
    with torch.no_grad():
        torch.nn.functional.linear(x, matrix)
        end = time.perf_counter() + float(request["seconds"])
        while time.perf_counter() < end:
            start = clock()
            torch.nn.functional.linear(x, matrix)
            best = min(best, clock() - start)
    return best


torch.set_num_threads(len(os.sched_getaffinity(0)))
for line in sys.stdin:
    print(json.dumps({"seconds": shortest(json.loads(line)), "torch": torch.__version__}), flush=True)
