"""Compiles the steps of one deployment in its own process, which a compiler's fatal error may end.

`jaxvllm.planner.compiler` starts it, with JAX_PLATFORMS=cpu. It reads a `Deployment` from standard input, and writes
one line to standard output, `Findings` or a `Refusal`. Messages of compilers go to standard error.
"""

import os
import sys
import time
from importlib.metadata import version

import jax
import jax.numpy as jnp

from jaxvllm.models.params import abstract_params
from jaxvllm.planner.compiler import Findings, Refusal, StepFindings, to_json
from jaxvllm.planner.deployment import Deployment
from jaxvllm.planner.hlo import UnreadableHlo, largest_vmem_array, read_collectives
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.memory import count_pages
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.deviceless import compile_only_devices
from sharding.placement import make_mesh

# The packages whose versions decide the result.
PACKAGES = {"tpu": ("jax", "libtpu"), "gpu": ("jax", "jax-cuda13-plugin"), "cpu": ("jax", "jaxlib")}
# A message of XLA contains one of these when there is no room.
_NO_ROOM = ("RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory")


def main() -> None:
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    deployment = Deployment.from_json(sys.stdin.read())
    print(to_json(_outcome(deployment)), file=answer, flush=True)


def _outcome(deployment: Deployment) -> Findings | Refusal:
    try:
        return compile_steps(deployment)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # XLA's own is a RuntimeError
        message = next(iter(str(error).splitlines()), type(error).__name__)
        if any(words in str(error) for words in _NO_ROOM):
            return Refusal("memory", message)
        of_compiler = isinstance(error, jax.errors.JaxRuntimeError | UnreadableHlo)
        return Refusal("compiler" if of_compiler else "usage", message)


def compile_steps(deployment: Deployment) -> Findings:
    """Compiles the largest step and the largest decode step.

    Raises ValueError, NotImplementedError, or RuntimeError when this environment has no compiler for the device or the
    compiler finds no room.
    """
    steps = CompiledSteps(deployment)
    return Findings(
        largest=steps.compile(deployment.largest),
        decode=steps.compile(deployment.decode),
        pool_bytes=deployment.pool_bytes(steps.num_pages),
        versions={package: version(package) for package in PACKAGES[steps.platform]},
    )


class CompiledSteps:
    """The steps of one deployment, each of which can be compiled."""

    def __init__(self, deployment: Deployment) -> None:
        """Compiles nothing yet. Raises ValueError or RuntimeError when this environment has no such devices."""
        chip = deployment.target.chip
        shape = deployment.compiled_mesh
        devices = compile_only_devices(chip, shape.num_devices) if chip else jax.devices()
        mesh = make_mesh(shape, devices)
        dtype = jnp.dtype(deployment.dtype)
        # The pools take half of the memory that the weights leave: a copy of them could not hide, and the step has
        # room. They have no more pages than an engine would have, because they must not take the room of a step whose
        # model is small.
        half = (deployment.target.memory_bytes - deployment.share.weight_bytes) // 2
        self.num_pages = max(count_pages(half, deployment.pool_bytes, deployment.useful_pages), 2)
        cache = deployment.cache_shape(self.num_pages)
        params, pages = (
            abstract_params(deployment.spec, dtype, deployment.layout, mesh, deployment.forms),
            cache.pages(deployment.spec, deployment.backend, mesh),
        )
        self.platform = devices[0].platform
        self._is_tpu = deployment.target.platform == "tpu"
        self._num_devices = shape.num_devices
        self.compiler = StepCompiler(params, pages, deployment.spec, cache, deployment.backend, mesh)

    def compile(self, bucket: Bucket) -> StepFindings:
        """Compiles the step of one shape."""
        start = time.monotonic()
        program = self.compiler.compile(bucket)
        seconds = time.monotonic() - start
        memories = [memory for part in program.parts if (memory := part.memory_analysis())]
        texts = [text for part in program.parts if (text := part.as_text())]
        assert len(memories) == len(texts) == len(program.parts), "every compiler of ours tells"
        return StepFindings(
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            seconds=seconds,
            argument_bytes=max(memory.argument_size_in_bytes for memory in memories),
            step_bytes=program.step_bytes,
            temp_bytes=max(memory.temp_size_in_bytes for memory in memories),
            vmem_array_bytes=max(largest_vmem_array(text)[0] for text in texts) if self._is_tpu else 0,
            collectives=tuple(c for text in texts for c in read_collectives(text)) if self._num_devices > 1 else (),
        )


if __name__ == "__main__":
    main()
