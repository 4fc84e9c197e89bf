"""The handlers that XLA can call in this process: each is compiled and registered when a program first names it.

A compiled program calls handlers by their names. So whoever stores programs stores `registered_code` with them, and
gives it to `register_code` before a program is loaded: nothing is emitted or compiled then.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import jax

from pallas_kernels.chips import CpuChip

if TYPE_CHECKING:
    from pallas_kernels.cpu.loaded_handler import LoadedHandler


class CodeStore(Protocol):
    """Keeps the machine code of handlers by their names."""

    def load(self, target: str) -> bytes | None:
        """Returns the code, or None if there is none."""

    def store(self, target: str, code: bytes) -> None:
        """Keeps the code."""


@dataclass(frozen=True)
class Handler:
    """A kernel for one CPU: `emit(emitter, frame, *options)` emits it."""

    emit: Callable[..., None]
    options: tuple[object, ...]  # dtypes and the like, which their texts tell apart
    chip: CpuChip

    @property
    def target(self) -> str:
        """The name by which XLA calls it, which no handler for other instructions shares.

        Stored programs bring handlers by these names: one with AMX must not come in the place of one without, where
        this process was refused the tile registers.
        """
        features = hashlib.sha256(repr(self.chip).encode()).hexdigest()[:8]
        return "_".join(("jaxvllm", self.emit.__name__, *map(str, self.options), str(self.chip.lanes), features))

    def __call__(self, out: Any, *arguments: jax.Array, in_place: bool = False) -> Any:
        """Calls it in a traced function. Neither XLA nor the handler checks shapes: callers must.

        `out` is the shape of its result, or a list of these. With `in_place` it is where the first argument is, which
        XLA copies if anything else reads it.
        """
        if (submit := _SUBMIT.get()) is None:
            _registered().add(self.target, self._compile)
        else:
            submit(self.target, self._compile)
        aliases = {0: 0} if in_place else None
        return jax.ffi.ffi_call(self.target, out, input_output_aliases=aliases)(*arguments)

    def _compile(self) -> bytes:
        from pallas_kernels.cpu.machine_code import compile_handler

        return compile_handler(self.target, lambda e, frame: self.emit(e, frame, *self.options), self.chip)


# What takes a kernel to be compiled, where another thread does that.
_SUBMIT: ContextVar[Callable[[str, Callable[[], bytes]], None] | None] = ContextVar("submit", default=None)


@contextmanager
def compiled_by_another_thread(store: CodeStore | None = None) -> Iterator[None]:
    """Has another thread compile the kernels that this one names within. All are registered when it ends.

    So a function is traced while LLVM, which does not hold Python's lock, compiles what it has called. No program that
    calls these kernels may be compiled before the end. Kernels that the `store` has are not compiled, and others are
    kept there.
    """
    kernels: list[Future[None]] = []

    def find(target: str, compile_it: Callable[[], bytes]) -> bytes:
        if store is None:
            return compile_it()
        code = store.load(target)
        if code is None:
            code = compile_it()
            store.store(target, code)
        return code

    def submit(target: str, compile_it: Callable[[], bytes]) -> None:
        arguments = target, partial(find, target, compile_it)
        try:
            kernels.append(thread.submit(_registered().add, *arguments))
        except RuntimeError:  # the interpreter shuts down, and starts nothing more in other threads
            _registered().add(*arguments)

    with ThreadPoolExecutor(1) as thread:
        token = _SUBMIT.set(submit)
        try:
            yield
        finally:
            _SUBMIT.reset(token)
    for kernel in kernels:
        kernel.result()


def registered_code() -> dict[str, bytes]:
    """Returns the machine code of all handlers of this process, by their names."""
    return _registered().code()


def register_code(codes: Mapping[str, bytes]) -> None:
    """Registers handlers that another process has compiled for this machine. It keeps those that it has already."""
    for target, code in codes.items():
        _registered().add(target, partial(bytes, code))


class _Registered:
    """The handlers that XLA knows. XLA's own table is one for the process, and forgets nothing."""

    def __init__(self) -> None:
        self._lock = Lock()  # several threads compile programs
        self._loaded: dict[str, Future[LoadedHandler]] = {}

    def add(self, target: str, code: Callable[[], bytes]) -> None:
        """Registers a handler, or waits until the thread that does so already is ready.

        Nothing is locked while LLVM works. The thread that makes pages and slots waited 0.4 s of a cold start for
        kernels of the model to be stored, and what it compiles next with it.
        """
        with self._lock:
            is_new = target not in self._loaded
            handler = self._loaded.setdefault(target, Future())
        if not is_new:
            handler.result()
            return
        try:
            handler.set_result(_loaded(target, code()))
        except BaseException as error:
            with self._lock:
                del self._loaded[target]
            handler.set_exception(error)
            raise

    def code(self) -> dict[str, bytes]:
        """Returns the code of all that are registered, without those that a thread compiles now."""
        with self._lock:
            return {target: handler.result().code for target, handler in self._loaded.items() if handler.done()}


def _loaded(target: str, code: bytes) -> "LoadedHandler":
    from pallas_kernels.cpu.loaded_handler import LoadedHandler

    loaded = LoadedHandler(target, code)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(loaded.address)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return loaded


@cache
def _registered() -> _Registered:
    return _Registered()
