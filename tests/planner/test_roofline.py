"""Floors, against figures by hand and counting by brute force."""

import pytest

from jaxvllm.planner.compiler import Findings, StepFindings
from jaxvllm.planner.hlo import Collective
from jaxvllm.planner.roofline import _pairs, decode_floors, prefill_floor
from pallas_kernels.chips import chip_named
from tests.planner.deployments import deployment


def findings(*collectives: Collective) -> Findings:
    decode = StepFindings(256, 256, 1.0, 0, 0, 0, 0, collectives)
    return Findings(StepFindings(2048, 256, 1.0, 0, 0, 0, 0, collectives), decode, 0, {})


def test_decode_reads_weights_and_context():
    planned, chip = deployment("Llama-3.1-8B", "h200"), chip_named("h200")
    one, *_ = decode_floors(planned, chip, findings(), 2048, 10**6)
    # All weights but the embedding, and 2049 tokens of 128 KiB: one is written.
    assert one.memory == pytest.approx((2 * (8_030_261_248 - 128256 * 4096) + 2049 * 131072) / 4.8e12, rel=1e-6)
    assert one.compute == pytest.approx(2 * (8_030_261_248 - 128256 * 4096 + 2048 * 32 * 2 * 4096) / 989e12, rel=1e-4)
    assert one.links == 0
    assert one.seconds == one.memory
    assert one.tokens_per_second == 1 / one.seconds


def test_batches_are_those_that_have_room():
    planned, chip = deployment("Llama-3.1-8B", "h200"), chip_named("h200")
    assert [floor.num_tokens for floor in decode_floors(planned, chip, findings(), 1000, 64_000)] == [1, 8, 32, 64]
    assert [floor.num_tokens for floor in decode_floors(planned, chip, findings(), 1000, 63_999)] == [1, 8, 32]
    few = deployment("Llama-3.1-8B", "h200", max_num_seqs=10)
    assert [floor.num_tokens for floor in decode_floors(few, chip, findings(), 1, 10**6)] == [1, 8]


def test_links_follow_the_batch_and_skip_what_is_conditional():
    planned, chip = deployment("Llama-3.1-8B", "v5e", mesh="1x8"), chip_named("v5e")
    told = findings(Collective("all-reduce", 65, 2**21, False), Collective("all-to-all", 2, 2**24, True))
    floors = decode_floors(planned, chip, told, 2048, 10**6)
    whole = 65 * 2 * 7 / 8 * 2**21 / 100e9
    assert [floor.links / whole for floor in floors] == pytest.approx([n / 256 for n in (1, 8, 32, 64, 128, 256)])
    assert prefill_floor(planned, chip, told).links == pytest.approx(whole)
    assert floors[-1].seconds == max(floors[-1].memory, floors[-1].compute) + floors[-1].links


def test_a_window_bounds_what_is_read():
    chip = chip_named("h200")
    mixed = deployment("gemma-2-9b", "h200")
    full = deployment(mixed.hf_config | {"sliding_window": None}, "h200")
    near, far = (decode_floors(mixed, chip, findings(), context, 10**7)[0] for context in (4096, 8192))
    wide = decode_floors(full, chip, findings(), 8192, 10**7)[0]
    # Half of the 42 layers see twice as much, the others what they saw; without windows all do.
    assert wide.memory - near.memory == pytest.approx(2 * (far.memory - near.memory))


@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (7, 3), (7, 7), (7, 100), (64, 16)])
def test_pairs_by_brute_force(tokens, window):
    assert _pairs(tokens, window) == sum(1 for q in range(tokens) for k in range(q + 1) if q - k < window)


@pytest.mark.parametrize(
    ("device", "mesh", "seconds"),
    # Of an all-reduce of 1 GB. Two chips have one link between them, and two devices of a v7x are one chip.
    [
        ("v5e", "1x2", 1e9 / 50e9),
        ("v5e", "1x4", 1.5e9 / 100e9),
        ("v7x", "1x2", 0),
        ("v7x", "1x4", 1e9 / 100e9),
        ("v7x", "1x8", 1.5e9 / 200e9),
        ("h200", "1x2", 1e9 / 450e9),
    ],
)
def test_links_are_those_between_chips(device, mesh, seconds):
    told = findings(Collective("all-reduce", 1, 10**9, False))
    floor = prefill_floor(deployment("Llama-3.1-8B", device, mesh=mesh), chip_named(device), told)
    assert floor.links == pytest.approx(seconds)


# On 2x4. What replicas send each other goes round a ring of two, and what all devices send each other round one of all.
@pytest.mark.parametrize(
    ("device", "over", "sent"),
    [("h200", "data", 1 / 2), ("h200", "all", 7 / 8), ("v7x", "all", 3 / 4)],  # a chip of v7x is two devices
)
def test_links_are_those_between_the_devices_that_take_part(device, over, sent):
    told = findings(Collective("ragged-all-to-all", 1, 10**9, False, over))
    planned = deployment("Qwen3-30B-A3B", device, mesh="2x4", enable_expert_parallel=True)
    links = prefill_floor(planned, chip_named(device), told).links
    assert links == pytest.approx(sent * 1e9 / (450e9 if device == "h200" else 200e9))


def test_stages_read_their_layers_in_each_tick():
    one, two = deployment("Llama-3.1-8B", "v6e"), deployment("Llama-3.1-8B", "v6e", mesh="2x1x1")
    chip, head, layers = chip_named("v6e"), 2 * 128256 * 4096, 2 * (8_030_261_248 - 2 * 128256 * 4096 - 4096)
    told = findings(Collective("collective-permute", 2, 2**21, False))
    few, of_stages = (decode_floors(planned, chip, told, 2048, 10**6) for planned in (one, two))
    # A few rows are one microbatch in two ticks: both halves of the layers, one after the other.
    assert of_stages[0].memory == pytest.approx(few[0].memory, rel=1e-3)
    assert of_stages[0].seconds == pytest.approx((head + layers + 2049 * 131072) / chip.hbm_bandwidth, rel=1e-3)
    assert of_stages[0].links == 0, "between hosts they are not known"
    # 2048 tokens are two microbatches: three ticks, each of a half of the layers for a half of the tokens.
    whole, staged = prefill_floor(one, chip, told), prefill_floor(two, chip, told)
    assert staged.compute == pytest.approx(3 / 4 * whole.compute, rel=1e-3)


def test_rings_are_what_is_published():
    # GB/s of a chip, both ways: two of the ports, one way, are a ring; a switch's ports are all of a GPU's.
    ports = {"v5e": (400, 4), "v6e": (800, 4), "v5p": (1200, 6), "v7x": (1200, 6)}
    nvlink = {"a100": 600, "h100": 900, "h200": 900, "b200": 1800}
    for name, (both_ways, count) in ports.items():
        assert chip_named(name).ring_bandwidth(4) == 2 * both_ways / count / 2 * 1e9
    for name, both_ways in nvlink.items():
        assert chip_named(name).ring_bandwidth(4) == both_ways / 2 * 1e9


def test_prefill_is_bound_by_the_matrix_units():
    planned, chip = deployment("Llama-3.1-8B", "h200"), chip_named("h200")
    floor = prefill_floor(planned, chip, findings())
    assert floor.num_tokens == 2048
    assert floor.seconds == floor.compute > floor.memory
    assert floor.compute == pytest.approx(2 * 2048 * 6_979_321_856 / 989e12, rel=0.05)
