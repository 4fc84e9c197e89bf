"""Compiling in a child process, so that a compiler's fatal error is a message and not the end."""

import os
import signal
import subprocess
import sys

from jaxvllm.planner.findings import Findings, Refusal, from_json
from jaxvllm.planner.job import Job


def compile_in_child(job: Job) -> Findings | Refusal:
    """What comes of compiling `job`'s steps in a process of its own, which this environment's compilers may end."""
    # With this platform jax looks for no device, and virtual ones are as many as the job needs.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.size)}
    done = subprocess.run(
        [sys.executable, "-m", "jaxvllm.planner.worker"],
        input=job.to_json(),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode == 0:
        return from_json(done.stdout)
    code = done.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = words[-1] if words else "no message"
    return Refusal("compiler", f"the compiler ended its process, {how}: {last}")
