"""The table of chips answers by device kind and by name, and each of its rows makes sense."""

import pytest

from pallas_kernels.chips import CHIPS, Chip, TpuChip, chip_named, chip_of

EVERY = pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)


@EVERY
def test_a_device_finds_its_chip(chip: Chip) -> None:
    assert chip_of(chip.device_kind) is chip
    assert chip_named(chip.name) is chip


def test_what_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'TPU v2': known are TPU v5 lite, .*NVIDIA L4, .*Tesla T4"):
        chip_of("TPU v2")
    with pytest.raises(ValueError, match="'h300': known are v5e, .*l4, .*t4"):
        chip_named("h300")


@EVERY
def test_units(chip: Chip) -> None:
    # A slip of a thousand in any column leaves these bounds.
    assert 14 * 2**30 < chip.hbm_bytes < 200 * 2**30
    assert 0.2e12 < chip.hbm_bandwidth < 10e12
    assert 60e12 < chip.bf16_flops < 2500e12
    if isinstance(chip, TpuChip):
        assert 2**20 <= chip.smem_bytes < chip.vmem_bytes <= 2**27
    else:
        # The system takes a KiB of each block but on Turing.
        taken = 0 if chip.compute_capability == (7, 5) else 2**10
        assert 48 * 2**10 < chip.shared_memory_per_block == chip.shared_memory_per_sm - taken
        assert chip.shared_memory_per_sm < chip.l2_bytes


def test_bf16_rates_are_dense() -> None:
    # Four tensor cores an SM, each so many multiply-adds a clock; data sheets assume a clock somewhat below the boost.
    # Those of GeForce have half of the rate where sums are in float32. Turing has eight with half of the rate each.
    of_geforce = {"rtx3090": 64, "rtx4090": 64, "rtx5090": 64}
    per_clocks = {"h100": 512, "h200": 512, "b200": 1024, "a100": 256, "a100-40gb": 256} | of_geforce
    for chip in CHIPS.values():
        if isinstance(chip, TpuChip):
            continue
        per_clock = per_clocks.get(chip.name, 128)
        assert 0.9 < chip.bf16_flops / (chip.num_sms * 4 * per_clock * 2 * chip.clock_ghz * 1e9) <= 1.01
