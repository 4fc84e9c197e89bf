"""The table of chips answers by device kind and by name, and each of its rows makes sense."""

import pytest

from pallas_kernels.chips import CHIPS, Chip, GpuChip, TpuChip, chip_named, chip_of

EVERY = pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)


@EVERY
def test_a_device_finds_its_chip(chip: Chip) -> None:
    assert chip_of(chip.device_kind) is chip
    assert chip_named(chip.name) is chip


def test_what_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'TPU v2': known are TPU v5 lite, .*NVIDIA L4"):
        chip_of("TPU v2")
    with pytest.raises(ValueError, match="'h300': known are v5e, .*l4"):
        chip_named("h300")


@EVERY
def test_units(chip: Chip) -> None:
    # A slip of a thousand in any column leaves these bounds.
    assert 15 * 2**30 < chip.hbm_bytes < 200 * 2**30
    assert 0.2e12 < chip.hbm_bandwidth < 10e12
    assert 100e12 < chip.bf16_flops < 2500e12
    if isinstance(chip, TpuChip):
        assert 2**20 <= chip.smem_bytes < chip.vmem_bytes <= 2**27
    else:
        assert 48 * 2**10 < chip.shared_memory_per_block < chip.shared_memory_per_sm < chip.l2_bytes


def test_bf16_rates_are_dense() -> None:
    # Four tensor cores an SM, each so many multiply-adds a clock; data sheets assume a clock somewhat below the boost.
    for name, per_clock in [("a100", 256), ("l4", 128), ("h100", 512), ("h200", 512), ("b200", 1024)]:
        chip = chip_named(name)
        assert isinstance(chip, GpuChip)
        assert 0.9 < chip.bf16_flops / (chip.num_sms * 4 * per_clock * 2 * chip.clock_ghz * 1e9) <= 1.01
