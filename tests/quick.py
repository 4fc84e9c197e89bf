"""Quick compilation, for programs that run for a few steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from jaxvllm.runtime.recipe import COMPILER_OPTIONS


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compiles with LLVM at -O0: the programs of engines, which take a third less CPU then, and those of `jax.jit`.

    XLA does the same to them before: HLO, memory and collectives are as ever. An engine that outlives the context needs
    `warm_up="full"`, or it would compile in the background later.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPILER_OPTIONS["cpu"], "xla_backend_optimization_level", 0)
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
