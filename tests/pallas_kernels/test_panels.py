"""The order of packed matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.tiling import aligned_zeros
from pallas_kernels.packed_matmul import Panels, pack_into
from tests.pallas_kernels.cpu_chips import CPU_CHIPS


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("shape", [(5, 7), (2, 9, 8), (16, 4)], ids=str)
def test_an_element_lies_in_its_panel(shape: tuple[int, ...], depth: int) -> None:
    matrix = np.arange(1, np.prod(shape) + 1).reshape(shape)
    panels = Panels(4, depth)
    packed = panels.packed(matrix)
    assert packed.shape == panels.shape(*shape)
    for place in np.ndindex(*shape):
        *others, out, inn = place
        assert packed[(*others, out // 4, inn // depth, out % 4, inn % depth)] == matrix[place]
    assert np.count_nonzero(packed) == matrix.size  # the rest is zeros
    np.testing.assert_array_equal(panels.unpacked(packed, *shape[-2:]), matrix)


@pytest.mark.parametrize("lanes", sorted(CPU_CHIPS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_kernel_packs_as_numpy_does(dtype: str, lanes: int) -> None:
    chip = CPU_CHIPS[lanes]
    for shape in ((3, 37, 85), (130, 64), (1, 7)):
        matrix = np.random.default_rng(0).integers(1, 100, shape).astype(jnp.dtype(dtype))
        expected = Panels.of(chip, dtype).packed(matrix)
        packed = aligned_zeros(expected.shape, matrix.dtype)
        pack_into(packed, matrix, chip)
        np.testing.assert_array_equal(packed, expected)


def test_memory_that_xla_would_copy_is_refused() -> None:
    memory = aligned_zeros((2 * 16 + 1,), np.dtype(np.float32))[1:]
    with pytest.raises(ValueError, match="begins at a multiple of 64 bytes"):
        pack_into(memory.reshape(1, 2, 16, 1), np.ones((16, 2), np.float32), CPU_CHIPS[4])
