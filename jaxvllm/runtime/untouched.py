"""Uninitialized arrays on CPU: the operating system provides each part of their memory when it is first used.

XLA has no such array: `jax.lax.empty` writes zeros on CPU (jax 0.11.2). So a KV pool of 4 GiB took 4 GiB and a second
at start, although a few requests fill only a tenth of it.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import jax
from jax.sharding import Mesh

_TARGET = "jaxvllm_untouched"
# XLA's FFI, version 0.4 (xla/ffi/api/c_api.h, which jaxlib brings).
_VERSION = (0, 4)
_METADATA_EXTENSION = 1


def untouched(struct: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.Array:
    """Returns an array like `struct`, spread over the CPU devices of `mesh`. Its values are arbitrary.

    The first call for such an array compiles a program, which takes some milliseconds.
    """
    array: jax.Array = _program(struct, mesh)()
    return array


@cache
def _program(struct: jax.ShapeDtypeStruct, mesh: Mesh) -> Callable[[], jax.Array]:
    _register()
    axes = struct.sharding.spec
    shard = jax.ShapeDtypeStruct(struct.sharding.shard_shape(struct.shape), struct.dtype)
    make = jax.ffi.ffi_call(_TARGET, shard)
    traced = jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=axes, check_vma=False)).trace()
    # Kept compiled: jax.clear_caches() would forget it, and an engine that wakes up compiles nothing.
    program: Callable[[], jax.Array] = traced.lower().compile()
    return program


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
    """Leaves the output as it was allocated, tells XLA the version when it asks, and returns None for no error."""
    extension = frame.contents.extension
    if extension and extension.contents.base.kind == _METADATA_EXTENSION:
        version = extension.contents.metadata.contents.version
        version.major, version.minor = _VERSION
    return None


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_leave_untouched), platform="cpu")
