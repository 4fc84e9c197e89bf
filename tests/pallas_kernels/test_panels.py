"""The order of packed matrices."""

import numpy as np
import pytest

from pallas_kernels.packed_matmul.panels import Panels


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
