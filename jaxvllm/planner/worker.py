"""Compiles the steps of one job, in a process that a compiler's fatal error may take along.

`jaxvllm.planner.compiler` starts it, with JAX_PLATFORMS=cpu. Reads a `Job` from standard input and writes one line to
standard output, `Findings` or a `Refusal`; what compilers print goes to standard error.
"""

import os
import sys
import time
from importlib.metadata import version

import jax
import jax.numpy as jnp

from jaxvllm.models.params import Layout, abstract_params
from jaxvllm.planner.collectives import UnreadableHlo, read_collectives
from jaxvllm.planner.findings import Findings, Refusal, StepFindings, to_json
from jaxvllm.planner.job import Job
from jaxvllm.planner.vmem import largest_vmem_array
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.memory import step_bytes
from jaxvllm.runtime.runner import CacheShape, compile_step
from pallas_kernels.deviceless import compile_only_devices
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

# What decides what comes out.
PACKAGES = {"tpu": ("jax", "libtpu"), "gpu": ("jax", "jax-cuda13-plugin"), "cpu": ("jax", "jaxlib")}
# XLA says so in any of these ways, in the middle of a long message.
_NO_ROOM = ("RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory")


def main() -> None:
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = Job.from_json(sys.stdin.read())
    print(to_json(_outcome(job)), file=answer, flush=True)


def _outcome(job: Job) -> Findings | Refusal:
    try:
        return compile_job(job)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # XLA's own is a RuntimeError
        message = next(iter(str(error).splitlines()), type(error).__name__)
        if any(words in str(error) for words in _NO_ROOM):
            return Refusal("memory", message)
        of_compiler = isinstance(error, jax.errors.JaxRuntimeError | UnreadableHlo)
        return Refusal("compiler" if of_compiler else "usage", message)


def compile_job(job: Job) -> Findings:
    """Compiles the largest step and the largest decode step.

    Raises ValueError, NotImplementedError, or RuntimeError when this environment has no compiler for the device or the
    compiler finds no room.
    """
    chip = job.target.chip
    devices = compile_only_devices(chip, job.size) if chip else jax.devices()
    mesh = make_mesh(MeshShape(1, job.size), devices)
    dtype = jnp.dtype(job.dtype)
    layout: Layout = "stacked" if chip else "separate"
    # Half of what the weights leave: a copy of the pages could not hide, and the step has room. No more than an engine
    # would have: it must not take the room of a step whose model is small.
    half = (job.target.memory_bytes - job.share.weight_bytes) // 2 // job.page_bytes
    num_pages = max(min(half, job.useful_pages), 2)
    shape = CacheShape(num_pages, job.page_size, job.max_num_seqs, job.max_pages, jnp.dtype(job.page_dtype))
    params, pages = abstract_params(job.spec, dtype, layout, mesh), shape.pages(job.spec, job.backend, mesh)

    def compile_bucket(bucket: Bucket) -> StepFindings:
        start = time.monotonic()
        compiled = compile_step(params, pages, job.spec, shape, bucket, job.backend, mesh)
        seconds = time.monotonic() - start
        memory, hlo = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and hlo is not None, "every compiler of ours tells"
        return StepFindings(
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes,
            step_bytes=step_bytes(compiled),
            temp_bytes=memory.temp_size_in_bytes,
            vmem_array_bytes=largest_vmem_array(hlo)[0] if job.target.platform == "tpu" else 0,
            collectives=read_collectives(hlo) if job.size > 1 else (),
        )

    return Findings(
        largest=compile_bucket(job.largest),
        decode=compile_bucket(job.decode),
        pool_bytes=num_pages * job.page_bytes,
        versions={package: version(package) for package in PACKAGES[devices[0].platform]},
    )


if __name__ == "__main__":
    main()
