"""Uninitialized arrays on CPU: the operating system provides each part of their memory when it is first used.

XLA has no such array: `jax.lax.empty` writes zeros on CPU (jax 0.11.2). So a KV pool of 4 GiB took 4 GiB and a second
at start, although a few requests fill only a tenth of it.
"""

import ctypes
from functools import cache
from typing import Any

import jax

_TARGET = "jaxvllm_untouched"
# XLA's FFI, version 0.4 (xla/ffi/api/c_api.h, which jaxlib brings).
_VERSION = (0, 4)
_METADATA_EXTENSION = 1


def untouched(structs: Any) -> Any:
    """Returns arrays like a tree of shapes and dtypes, in a function that is traced for CPUs. Any value may be in them.

    `register_untouched` must have been called before such a program is compiled or loaded.
    """
    return jax.tree.map(lambda shape: jax.ffi.ffi_call(_TARGET, shape)(), structs)


@cache
def register_untouched() -> None:
    """Tells XLA what programs with `untouched` arrays call."""
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_leave_untouched), platform="cpu")


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", ctypes.c_void_p))


class _ApiVersion(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _ArrayMetadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _ApiVersion))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_ArrayMetadata)))


class _CallFrame(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_MetadataExtension)))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _leave_untouched(frame):  # type: ignore[no-untyped-def]
    """Leaves the outputs as they were allocated, tells XLA the version when it asks, and returns None for no error."""
    extension = frame.contents.extension
    if extension and extension.contents.base.kind == _METADATA_EXTENSION:
        version = extension.contents.metadata.contents.version
        version.major, version.minor = _VERSION
    return None
