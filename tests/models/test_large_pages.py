"""Memory of weights on a CPU."""

import gc
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxvllm.models.large_pages import _LARGE_PAGE, _PIECE, kept_zeros


def test_arrays_lie_beside_each_other_where_xla_uses_them_in_place() -> None:
    device = jax.devices()[0]
    kinds = [((3, 5), np.float32), ((7,), np.uint8), ((0, 4), np.float32), ((1000, 1000), np.int8)] * 12
    arrays = [kept_zeros(shape, np.dtype(dtype)) for shape, dtype in kinds]
    for number, (array, (shape, dtype)) in enumerate(zip(arrays, kinds, strict=True), 1):
        assert array.shape == shape and array.dtype == dtype and not array.any()
        array[...] = number
        if array.size:
            assert jax.device_put(array, device).unsafe_buffer_pointer() == array.ctypes.data
    for number, array in enumerate(arrays, 1):
        assert (array == array.dtype.type(number)).all(), "no array has memory of another"
    assert len({id(array.base) for array in arrays if array.size}) <= 3, "of 12 MB, in pieces of 32 MiB"


def test_a_large_array_has_memory_of_its_own_and_it_is_freed_with_it() -> None:
    small = kept_zeros((8,), np.dtype(np.float32))
    large = kept_zeros((_PIECE + 3,), np.dtype(np.uint8))
    assert large.ctypes.data % _LARGE_PAGE == 0
    assert kept_zeros((8,), np.dtype(np.float32)).ctypes.data == small.ctypes.data + 64
    memory = weakref.ref(large.base)
    del large
    gc.collect()
    assert memory() is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how memory is mapped")
def test_memory_is_private_because_shared_memory_may_have_no_large_pages() -> None:
    array = kept_zeros((_PIECE,), np.dtype(np.uint8))
    address = array.ctypes.data
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in span.split("-")), permissions) for span, permissions, *_ in mappings]
    assert [permissions for first, last, permissions in spans if first <= address < last] == ["rw-p"]
