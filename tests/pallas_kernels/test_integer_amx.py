"""The product with integers of few bits by AMX, which this CPU emulates: the same bits as by its vectors."""

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.cpu.machine_code import handler_assembly
from pallas_kernels.integer_matmul import integer_matmul
from pallas_kernels.integer_matmul.code_panels import CodePanels
from pallas_kernels.integer_matmul.kernel import matmul
from pallas_kernels.quantized_matmul.code import IQ4
from tests.pallas_kernels.cpu_chips import SAPPHIRE_RAPIDS, WITH_AMX
from tests.pallas_kernels.test_integer_matmul import arrays_of

COLUMNS = WITH_AMX.panel_columns
PANELS = {
    "int8 by row": CodePanels(COLUMNS, 8, None, "float32", zero=128, by_row=True),
    "int8 of 96": CodePanels(COLUMNS, 8, 96, "bfloat16", zero=128),
    "int4 of 32": CodePanels(COLUMNS, 4, 32, "bfloat16", offsets="zeros"),
    "a table of 32": CodePanels(COLUMNS, 4, 32, "float16", looked_up=IQ4),
    "six bits of 16": CodePanels(COLUMNS, 6, 16, "uint8", offsets="mins", span=256),
}


@pytest.mark.parametrize("panels", PANELS.values(), ids=PANELS)
def test_tiles_have_the_bits_of_vectors(panels: CodePanels) -> None:
    outs, ins = 70, 32 * 9 if panels.group in (None, 32, 96) else 512
    x = np.random.default_rng(1).standard_normal((19, ins), np.float32)  # a tile, and three rows by vectors
    held = arrays_of(panels, outs, ins)

    def product(chip: CpuChip) -> Any:
        return jax.jit(lambda x, held: integer_matmul(x, [held], 0, panels=panels, outs=outs, chip=chip))(x, held)

    result, expected = np.asarray(product(WITH_AMX)), np.asarray(product(host_chip()))
    assert np.abs(expected).min() > 0
    np.testing.assert_array_equal(result, expected)


def test_it_is_compiled_to_the_instructions_of_amx() -> None:
    for panels in (PANELS["int8 by row"], PANELS["int4 of 32"]):
        assembly = handler_assembly("handler", lambda e, f, p=panels: matmul(e, f, "bfloat16", p), SAPPHIRE_RAPIDS)
        emitted = [line.split()[0] for line in assembly.splitlines() if line]
        # Sixteen tokens by four tiles of 16 columns; fewer by vectors.
        names = ("ldtilecfg", "tilerelease", "tdpbsud", "tileloadd", "tilestored")
        assert [emitted.count(name) for name in names] == [1, 1, 4, 9, 4]
        assert "vpdpbusd" in emitted
