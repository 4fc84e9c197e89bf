"""Quick compilation, for programs that run for a few steps."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import pytest
from jax._src import compiler

from jaxvllm.models.spec import ModelSpec
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


def _message(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer that holds bytes, a text or another message."""
    return b"".join(map(_varint, (number << 3 | 2, len(content)))) + content


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


# `CompileOptionsProto.executable_build_options.debug_options.xla_backend_extra_options`. None of jax's own
# `compiler_options` leads there.
_EARLIER_EMITTERS = _message(
    3, _message(3, _message(500, _message(1, b"xla_cpu_disable_new_fusion_emitters") + _message(2, b"true")))
)
_usual_options = compiler.get_compile_options


def _options_with_earlier_emitters(*args: Any, **kwargs: Any) -> Any:
    options = _usual_options(*args, **kwargs)
    return type(options).ParseFromString(options.SerializeAsString() + _EARLIER_EMITTERS)


@contextmanager
def earlier_emitters() -> Iterator[None]:
    """XLA emits the loops of fusions as it did before 2025, which compiles in half the time and runs as well.

    Only models with states are much slower then (the tests of Qwen 3.5's took 102 seconds of the CPU and not 44).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", _options_with_earlier_emitters)
        # What a CPU does not read, and the name of a program contains: none of these is loaded for an engine that is
        # compiled in the usual way.
        patch.setenv("LIBTPU_INIT_ARGS", "earlier emitters")
        yield


def quick_emitters(spec: ModelSpec) -> AbstractContextManager[None]:
    """Returns the emitters with which tests of this model are quicker."""
    return nullcontext() if any(layer.keeps_state for layer in spec.layers) else earlier_emitters()


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
def quick_engines(have_states: bool = False) -> Iterator[None]:
    """Engines that start within compile quickly, and what few requests need only on demand."""
    with quick_compilation(), rare_programs(on_demand=True), nullcontext() if have_states else earlier_emitters():
        yield
