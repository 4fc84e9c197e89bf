"""The handlers that XLA can call in this process: each is compiled and registered when a program first names it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import jax

from pallas_kernels.chips import CpuChip

if TYPE_CHECKING:
    from pallas_kernels.cpu.machine_code import LoadedHandler


@dataclass(frozen=True)
class Handler:
    """A kernel for one CPU: `emit(emitter, frame, *dtypes)` emits it."""

    emit: Callable[..., None]
    dtypes: tuple[str, ...]
    chip: CpuChip

    @property
    def target(self) -> str:
        """The name by which XLA calls it."""
        return "_".join(("jaxvllm", self.emit.__name__, *self.dtypes, str(self.chip.lanes)))

    def __call__(self, out: jax.ShapeDtypeStruct, *arguments: jax.Array) -> Any:
        """Calls it in a traced function. Neither XLA nor the handler checks shapes: callers must."""
        _registered().add(self)
        return jax.ffi.ffi_call(self.target, out)(*arguments)


class _Registered:
    """The handlers that XLA knows. XLA's own table is one for the process, and forgets nothing."""

    def __init__(self) -> None:
        self._lock = Lock()  # several threads compile programs
        self._loaded: dict[str, tuple[Handler, LoadedHandler]] = {}

    def add(self, handler: Handler) -> None:
        from pallas_kernels.cpu.machine_code import LoadedHandler, compile_handler

        with self._lock:
            if handler.target in self._loaded:
                assert self._loaded[handler.target][0] == handler, "two handlers have one name"
                return

            def emit(e: Any, frame: Any) -> None:
                handler.emit(e, frame, *handler.dtypes)

            loaded = LoadedHandler(handler.target, compile_handler(handler.target, emit, handler.chip))
            function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(loaded.address)
            jax.ffi.register_ffi_target(handler.target, jax.ffi.pycapsule(function), platform="cpu")
            self._loaded[handler.target] = handler, loaded


@cache
def _registered() -> _Registered:
    return _Registered()
