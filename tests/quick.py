"""Quick compilation, for programs that run for a few steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jaxvllm.runtime.programs import Programs
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


_begin = Programs.__init__


def _begin_with_buckets_alone(self: Any, ladder: Any, compile_step: Any, yields: bool, afterwards: Any) -> None:
    _begin(self, ladder, compile_step, yields)


@contextmanager
def rare_programs(on_demand: bool) -> Iterator[None]:
    """Engines that start within compile what few requests need when the first of these comes, or in advance, as served.

    It is what beam searches, masks, rare parameters and readouts need: nearly two seconds of the CPU an engine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "__init__", _begin_with_buckets_alone if on_demand else _begin)
        yield


@contextmanager
def quick_engines() -> Iterator[None]:
    """Engines that start within compile quickly, and what few requests need only on demand."""
    with quick_compilation(), rare_programs(on_demand=True):
        yield
