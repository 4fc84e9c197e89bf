"""Quick compilation, for programs that run for a few steps.

Processes of engines that tests start import this, too (`tests/children/sitecustomize.py`), so it needs no pytest.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import jax
from jax._src import compiler

from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.recipe import COMPILER_OPTIONS, Recipe
from jaxvllm.runtime.stored_programs import StoredPrograms


def _message(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer that holds bytes, a text or another message."""
    return b"".join(map(_varint, (number << 3 | 2, len(content)))) + content


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def _debug_options(content: bytes) -> bytes:
    """Returns `CompileOptionsProto.executable_build_options.debug_options`."""
    return _message(3, _message(3, content))


# What a program of a process of its own begins with, whose engines are to compile quickly.
QUICKLY = """
from tests.quick import quick_engines

quickly = quick_engines()
quickly.__enter__()
"""
# `xla_cpu_parallel_codegen_split_count`: by default a program has up to 32 parts, each with what all of them need.
_ONE_PART = _debug_options(_varint(323 << 3) + _varint(1))
# `xla_backend_extra_options`. None of jax's own `compiler_options` leads there.
_EARLIER_EMITTERS = _debug_options(
    _message(500, _message(1, b"xla_cpu_disable_new_fusion_emitters") + _message(2, b"true"))
)
# `xla_disable_hlo_passes`. With this pass, a scatter of one row is a fusion that reads, chooses and writes a slice, and
# the earlier emitters copy the whole array for it. Such a row is the token of the only request, on its way into its
# pages: 600 ms of the CPU for each step of an engine of the demo model with the default pool.
_EARLIER_EMITTERS += _debug_options(_message(30, b"scatter_expander"))
# A CPU does not read this variable, and the name of a program contains it: no program of the earlier emitters is loaded
# for an engine that is compiled in the usual way.
_UNREAD = "LIBTPU_INIT_ARGS"


@contextmanager
def _more_options(serialized: bytes) -> Iterator[None]:
    """Adds to the options of everything that is compiled within."""
    usual = compiler.get_compile_options

    def more(*args: Any, **kwargs: Any) -> Any:
        options = usual(*args, **kwargs)
        return type(options).ParseFromString(options.SerializeAsString() + serialized)

    with mock.patch.object(compiler, "get_compile_options", more):
        yield


# The programs that copy pages: at -O0 a beam search took 200 ms of the CPU for each of its steps, and now takes 6.
_COPIES = {"fork_slots"}
_COPY_OPTIONS = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": False}
_usual_options = Recipe.options.fget


def _options(recipe: Recipe) -> dict[str, Any] | None:
    assert _usual_options is not None
    options: dict[str, Any] | None = _usual_options(recipe)
    copies = getattr(getattr(recipe.run, "func", recipe.run), "__name__", "") in _COPIES
    return (options or {}) | _COPY_OPTIONS if copies else options


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compiles with LLVM at -O0: the programs of engines, which take a third less CPU then, and those of `jax.jit`.

    XLA does the same to them before: HLO, memory and collectives are as ever. LLVM gets each program whole, which takes
    a tenth less. What an engine compiles after the end of the context is as usual.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    with (
        mock.patch.dict(COMPILER_OPTIONS["cpu"], xla_backend_optimization_level=0),
        mock.patch.object(Recipe, "options", property(_options)),
        _more_options(_ONE_PART),
    ):
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def earlier_emitters() -> Iterator[None]:
    """XLA emits the loops of fusions as it did before 2025, which compiles in half the time and runs as well.

    Only models with states are much slower then (the tests of Qwen 3.5's took 102 seconds of the CPU and not 44).
    """
    before = os.environ.get(_UNREAD)
    with _more_options(_EARLIER_EMITTERS):
        os.environ[_UNREAD] = "earlier emitters, scatters as they are"
        try:
            yield
        finally:
            os.environ.pop(_UNREAD)
            os.environ.update({} if before is None else {_UNREAD: before})


def quick_emitters(spec: ModelSpec) -> AbstractContextManager[None]:
    """Returns the emitters with which tests of this model are quicker."""
    return nullcontext() if any(layer.keeps_state for layer in spec.layers) else earlier_emitters()


class _OnDemand:
    """A program that is compiled, or loaded, when it is called first, or asked for anything else."""

    def __init__(self, make: Callable[[], jax.stages.Compiled]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: jax.stages.Compiled | None = None

    def _program(self) -> jax.stages.Compiled:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def __call__(self, *arguments: Any) -> Any:
        return self._program()(*arguments)

    def memory_analysis(self) -> Any:
        """Says that it needs none before it is compiled: engines ask that of their largest step when they start."""
        nothing = dict.fromkeys(("temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"), 0)
        return SimpleNamespace(**nothing) if self._made is None else self._made.memory_analysis()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program(), name)


_make_now = StoredPrograms.make


def _make_on_demand(self: StoredPrograms, recipe: Recipe) -> jax.stages.Compiled:
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(recipe.arguments)):
        return _make_now(self, recipe)  # or weights would live for as long as nobody needs the program
    return cast(jax.stages.Compiled, _OnDemand(partial(_make_now, self, recipe)))


@contextmanager
def programs_on_demand() -> Iterator[None]:
    """Engines that start within take every program for ready, and compile it in the first step that runs in it.

    Steps run in the buckets of an engine that has compiled everything. What no step of a test needs costs nothing, such
    as the whole sampler where all requests are plain, which takes one to two seconds of the CPU.
    """
    with mock.patch.object(StoredPrograms, "make", _make_on_demand):
        yield


@contextmanager
def programs_in_advance() -> Iterator[None]:
    """Engines that start within compile as those that serve do, also what few requests need."""
    with mock.patch.object(StoredPrograms, "make", _make_now):
        yield


@contextmanager
def quick_engines(have_states: bool = False, run_long: bool = False) -> Iterator[None]:
    """Engines that start within compile quickly, and each program only when a step needs it.

    Steps take several times as long at -O0. So those that `run_long`, for a thousand tokens or more, have the -O1 of
    engines that serve.
    """
    with (
        nullcontext() if run_long else quick_compilation(),
        programs_on_demand(),
        nullcontext() if have_states else earlier_emitters(),
    ):
        yield
