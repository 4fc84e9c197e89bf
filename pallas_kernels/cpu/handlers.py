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
    from pallas_kernels.cpu.emit import Emitter
    from pallas_kernels.cpu.frame import Frame
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
            _registered().add(self.target, self.compile)
        else:
            submit(self)
        aliases = {0: 0} if in_place else None
        return jax.ffi.ffi_call(self.target, out, input_output_aliases=aliases)(*arguments)

    def compile(self) -> bytes:
        """Returns its machine code."""
        from pallas_kernels.cpu.machine_code import compile_handler

        return compile_handler(self.target, lambda e, frame: self.emit(e, frame, *self.options), self.chip)


# What takes a kernel to be compiled, where another thread does that.
_SUBMIT: ContextVar[Callable[[Handler], None] | None] = ContextVar("submit", default=None)


@contextmanager
def compiled_by_another_thread(store: CodeStore | None = None) -> Iterator[list[Future[None]]]:
    """Has another thread compile the kernels that this one names within, and yields what is done when they are ready.

    At the end of the block XLA knows their names. So a program that calls them may be compiled beside them, but it must
    not run before all of them are ready. Kernels that the `store` has are not compiled, and others are kept there.
    """
    missing: list[Handler] = []
    ready: list[Future[None]] = []

    def compile_and_store(handler: Handler) -> bytes:
        code = handler.compile()
        if store is not None:
            store.store(handler.target, code)
        return code

    def submit(handler: Handler) -> None:
        if _registered().has(handler.target):
            return
        if store is not None and (code := store.load(handler.target)) is not None:
            _registered().add(handler.target, partial(bytes, code))
            return
        _registered().announce(handler)
        missing.append(handler)

    token = _SUBMIT.set(submit)
    try:
        yield ready
    finally:
        _SUBMIT.reset(token)
    # Not earlier: llvmlite has one lock, so that trampolines would wait for kernels, and tracing for Python's.
    thread = ThreadPoolExecutor(1)
    for handler in missing:
        arguments = handler.target, partial(compile_and_store, handler)
        try:
            ready.append(thread.submit(_registered().add, *arguments))
        except RuntimeError:  # the interpreter shuts down, and starts nothing more in other threads
            _registered().add(*arguments)
    thread.shutdown(wait=False)


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
        self._trampolines: dict[str, _Trampoline] = {}

    def has(self, target: str) -> bool:
        """Returns whether the code of a handler is there."""
        with self._lock:
            return target in self._loaded and self._loaded[target].done()

    def announce(self, handler: Handler) -> None:
        """Lets XLA know a handler whose code is to come. No program may run that calls it before `add` has ended."""
        with self._lock:
            loading = self._loaded.get(handler.target)
            if loading is None and handler.target not in self._trampolines:
                self._trampolines[handler.target] = _Trampoline(handler)
            is_known = handler.target in self._trampolines
        if loading is not None and not is_known:
            loading.result()

    def add(self, target: str, code: Callable[[], bytes]) -> None:
        """Registers a handler, or waits until the thread that does so already is ready.

        Nothing is locked while LLVM works. The thread that makes pages and slots waited 0.4 s of a cold start for
        kernels of the model, and what it compiles next with it.
        """
        with self._lock:
            is_new = target not in self._loaded
            handler = self._loaded.setdefault(target, Future())
        if not is_new:
            handler.result()
            return
        try:
            from pallas_kernels.cpu.loaded_handler import LoadedHandler

            loaded = LoadedHandler(target, code())
            trampoline = self._trampolines.get(target)
            if trampoline is None:
                _tell_xla(target, loaded)
            else:
                trampoline.leads_to(loaded)
            handler.set_result(loaded)
        except BaseException as error:
            with self._lock:
                del self._loaded[target]
            handler.set_exception(error)
            raise

    def code(self) -> dict[str, bytes]:
        """Returns the code of all that are registered, without those that a thread compiles now."""
        with self._lock:
            return {target: handler.result().code for target, handler in self._loaded.items() if handler.done()}


class _Trampoline:
    """The handler that XLA calls until the process ends, where a program was compiled before the code of its kernel.

    All that it does is to call that code, which takes a nanosecond. Without it XLA waited for LLVM: a cold start of the
    embedded model took 0.2 s longer.
    """

    def __init__(self, handler: Handler):
        from pallas_kernels.cpu.loaded_handler import LoadedHandler
        from pallas_kernels.cpu.machine_code import compile_handler

        self._address = ctypes.c_uint64()
        place = ctypes.addressof(self._address)

        def jump(e: "Emitter", frame: "Frame") -> None:
            e.call_address(e.load_int(e.integer(place)), frame.address)

        self._code = LoadedHandler(handler.target, compile_handler(handler.target, jump, handler.chip))
        _tell_xla(handler.target, self._code)

    def leads_to(self, code: "LoadedHandler") -> None:
        """Sets the code that it calls."""
        self._address.value = code.address


def _tell_xla(target: str, code: "LoadedHandler") -> None:
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(code.address)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")


@cache
def _registered() -> _Registered:
    return _Registered()
