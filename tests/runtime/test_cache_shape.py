"""Which layers form a group of the KV cache, and how many pages each group has."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.typing import DTypeLike

from jaxvllm.core.kv_cache import GroupSize
from jaxvllm.core.page_groups import windowed_pages
from jaxvllm.engine.page_exchange import page_format
from jaxvllm.models.families import model_spec
from jaxvllm.models.layer_memory import KeysAndValues
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.planner.known_models import known_models
from jaxvllm.planner.share import Share
from jaxvllm.runtime.cache_shape import CacheShape, DraftCache, LayerGroup
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.ragged_paged_attention import KVQuantization, codes_of
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.changed import in_windows
from tests.models.fixture import Fixture

SHAPE = CacheShape(
    num_pages=2001, page_size=16, num_slots=64, max_pages=256, dtype=jnp.dtype(jnp.bfloat16), step_tokens=512
)


def spec_of(*windows: int | None) -> ModelSpec:
    """A small model with a layer for each window."""
    return in_windows(model_spec(known_models()["meta-llama/Llama-3.2-1B"]), *windows)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((None, None), [((0, 1), None)]),
        ((64, 64, None) * 2, [((2, 5), None), ((0, 1, 3, 4), 64)]),
        ((64, 64, 64), [((0, 1, 2), 64)]),  # no layer sees all
        ((32, None, 64, 32, None, 64), [((1, 4), None), ((2, 5), 64), ((0, 3), 32)]),
        ((4096, 64, 4096, 64), [((0, 2), None), ((1, 3), 64)]),  # no request outgrows 4096 positions
        ((8192, None), [((0, 1), None)]),
        ((64, 32, 32, None, 64, None, None, 32, 64, 64, 32), [(tuple(range(11)), None)]),  # read while the step runs
    ],
)
def test_layers_that_see_the_same_positions_are_a_group(
    windows: tuple[int | None, ...], groups: list[tuple[tuple[int, ...], int | None]]
) -> None:
    assert [(group.layers, group.window) for group in SHAPE.groups(spec_of(*windows))] == groups


def test_a_model_whose_layers_are_alike_has_the_pages_that_it_is_given() -> None:
    spec = spec_of(None, None)
    [size] = SHAPE.group_sizes(spec)
    assert (size.num_pages, size.window) == (2001, None)
    # Keys and values of 2 layers and 8 heads of 64 dimensions, in 2 bytes.
    assert SHAPE.device_bytes(Spread(spec), REFERENCE) == 2001 * 16 * 2 * 8 * 2 * 64 * 2


def test_a_windowed_group_has_pages_for_as_many_long_requests() -> None:
    # 2000 pages are 7.8 requests of 256 pages, each of which holds at most 129 pages of a window of 2048.
    _, size = SHAPE.group_sizes(spec_of(2048, 2048, None))
    assert windowed_pages(2048, 1, 16) == 129
    assert size.num_pages - 1 == -(-2000 * 129 // 256)


def test_a_windowed_group_has_half_of_an_even_share_at_least() -> None:
    # Memory for 2000 pages of one layer and as many of two would be 1000 of all three where the shares are even.
    spec = spec_of(64, 64, None)
    full, windowed = SHAPE.group_sizes(spec)
    even = (2000 + 2 * (windowed.num_pages - 1)) // 3
    assert (full.num_pages, windowed.num_pages - 1) == (2001, even // 2)


@pytest.mark.parametrize("num_pages", [2, 5, 30, 300])
def test_what_fits_into_the_first_group_fits_into_the_others(num_pages: int) -> None:
    spec = spec_of(64, 64, None)
    full, windowed = SHAPE.with_pages(num_pages).group_sizes(spec)
    longest = min(num_pages - 1, 256)  # pages of a request that the first group can hold
    assert min(longest, windowed_pages(64, 512, 16)) <= windowed.num_pages - 1 <= full.num_pages - 1


def test_more_pages_take_more_memory() -> None:
    spec = spec_of(64, 64, None)
    sizes = [SHAPE.with_pages(count).device_bytes(Spread(spec), REFERENCE) for count in range(2, 600)]
    assert sizes == sorted(sizes)


def test_programs_depend_on_the_token_budget_only_where_there_are_windows() -> None:
    other = replace(SHAPE, step_tokens=2048)
    alike, windowed = spec_of(None, None), spec_of(64, None)
    assert SHAPE.of_programs(alike) == other.of_programs(alike)
    assert SHAPE.of_programs(alike).group_sizes(alike) == SHAPE.group_sizes(alike)
    assert SHAPE.of_programs(windowed) == SHAPE != other.of_programs(windowed)


def test_memories_are_grouped_by_what_they_keep() -> None:
    """Two sizes of heads are two groups, also where no request outgrows a window; layers that read are in none."""
    spec = model_spec(Fixture.load("gemma4").config)
    wide, narrow = KeysAndValues(2, 24, None), KeysAndValues(2, 16, 32)
    shape = CacheShape(9, 16, 4, max_pages=8, dtype=jnp.dtype("float32"), step_tokens=16)
    assert shape.groups(spec) == (LayerGroup((1,), wide), LayerGroup((0, 2, 3), narrow))
    short = replace(shape, max_pages=2)
    assert short.groups(spec) == (LayerGroup((0, 2, 3), narrow.seeing(None)), LayerGroup((1,), wide))
    assert [size.window for size in short.group_sizes(spec)] == [None, None]
    # Full layers of one KV head on two devices: each has a copy, and pages travel with one.
    keys = model_spec(Fixture.load("gemma4-keys").config)
    mesh = make_mesh(MeshShape(1, 2), jax.devices())
    arrays = page_format("", keys, shape, REFERENCE, mesh).arrays
    assert [(array.num_layers, array.num_heads, array.copies, array.width) for array in arrays] == [
        (2, 1, 2, 48),
        (4, 2, 1, 32),
    ]
    share = Share(Spread(keys, 2), jnp.dtype("float32"))
    assert share.page_bytes(16, REFERENCE) == 16 * 4 * (2 * 48 + 4 * 32)


@pytest.mark.parametrize(("by_token", "token_bytes"), [(False, 48), (True, 48 + 8)])
def test_keys_and_values_of_eight_bits_are_counted_with_their_scales(by_token: bool, token_bytes: int) -> None:
    """States stay in float32, and take a larger share of the memory beside smaller pages."""
    spec, quantization = model_spec(Fixture.load("qwen3_5").config), KVQuantization("float8_e4m3fn", by_token)
    shape = CacheShape(41, 16, 4, max_pages=8, dtype=jnp.dtype("float32"), step_tokens=16, quantization=quantization)
    mesh = make_mesh(MeshShape(1, 2), jax.devices())
    pages, states = shape.pages(spec, REFERENCE, mesh)
    assert [(of.shape[2:], of.dtype) for of in jax.tree.leaves(pages)] == [
        ((2, 16, 48), jnp.uint8),
        *([((2, 2, 16), jnp.float32)] if by_token else []),
    ]
    assert codes_of(states).dtype == jnp.float32
    [keys, _] = (group.memory for group in shape.groups(spec))
    assert keys.page_bytes(16, jnp.float32, quantization) == 2 * 16 * token_bytes
    share = Share(Spread(spec, 2), jnp.dtype("float32"))
    assert share.page_bytes(16, REFERENCE, quantization) == 2 * 16 * token_bytes  # of one head, in two layers
    # What travels of a page: its scales belong to the group of its codes.
    arrays = page_format("", spec, shape, REFERENCE, mesh).arrays
    assert [array.group for array in arrays] == [0, *([0] if by_token else []), 1]
    assert shape.device_bytes(Spread(spec, 2), REFERENCE) == sum(
        of.size * of.dtype.itemsize // 2 for of in jax.tree.leaves((pages, states))
    )


def test_a_state_is_a_page_of_a_group_that_slides() -> None:
    spec = model_spec(Fixture.load("qwen3_5").config)
    shape = CacheShape(41, 16, 4, max_pages=8, dtype=jnp.dtype("bfloat16"), step_tokens=16)
    attention, states = shape.groups(spec)
    assert (attention.layers, states.layers) == ((2, 4), (0, 1, 3, 5))
    assert attention.memory == KeysAndValues(2, 24, None) and states.memory.keeps_state
    full, kept = shape.group_sizes(spec)
    assert (full, kept) == (GroupSize(41), GroupSize(21, keeps_state=True))  # five requests of 8 pages, 4 states each
    pages = shape.pages(spec, REFERENCE, make_mesh(MeshShape(1, 2), jax.devices()))
    assert [(of.shape[:3], of.dtype) for of in pages] == [((2, 41, 2), jnp.bfloat16), ((4, 21, 4), jnp.float32)]
    share = Share(Spread(spec, 2), jnp.dtype("bfloat16"))
    assert share.page_bytes(16, REFERENCE) == 2 * 16 * 48 * 2
    assert share.state_bytes(16, REFERENCE) == 4 * states.memory.page_bytes(16, "bfloat16") // 2


def test_a_layer_that_keeps_several_things_is_in_as_many_groups() -> None:
    spec = model_spec(Fixture.load("falcon_h1").config)
    shape = CacheShape(41, 16, 4, max_pages=8, dtype=jnp.dtype("float32"), step_tokens=16)
    attention, states = shape.groups(spec)
    assert attention.layers == states.layers == (0, 1, 2)
    assert attention.memory == KeysAndValues(2, 12, None) and states.memory.keeps_state
    # Two groups of Mamba-2 on four devices have half of their heads each. No part is a copy of another.
    mesh = make_mesh(MeshShape(1, 4), jax.devices())
    arrays = page_format("", spec, shape, REFERENCE, mesh).arrays
    assert [(array.num_layers, array.num_heads, array.copies) for array in arrays] == [(3, 2, 2), (3, 4, 1)]
    window, scan = shape.groups(model_spec(Fixture.load("mamba").config))
    assert window.layers == scan.layers == (0, 1, 2) and window.memory != scan.memory


def test_each_stage_has_pages_for_the_most_layers_of_a_group_that_one_has() -> None:
    spec = model_spec(Fixture.load("lfm2").config)  # two states and attention, and then one of each
    shape = CacheShape(41, 16, 4, max_pages=8, dtype=jnp.dtype("float32"), step_tokens=16)
    spread, mesh = Spread(spec, 1, 2), make_mesh(MeshShape(1, 1, stages=2), jax.devices())
    attention, states = (group.memory for group in shape.groups(spec))
    assert [shape.groups(part) for part in spread.parts] == [
        (LayerGroup((2,), attention), LayerGroup((0, 1), states)),
        (LayerGroup((1,), attention), LayerGroup((0,), states)),
    ]
    assert shape.stage_room(spread) == [1, 2]
    pages = shape.pages(spec, REFERENCE, mesh)
    assert [of.sharding.shard_shape(of.shape)[0] for of in pages] == [1, 2]
    bytes_of = [of.size * of.dtype.itemsize for of in pages]
    assert shape.device_bytes(spread, REFERENCE) == sum(bytes_of) // 2
    assert shape.empty_share(spread, REFERENCE) == pytest.approx(bytes_of[1] / 4 / sum(bytes_of))
    assert [array.stages for array in page_format("", spec, shape, REFERENCE, mesh).arrays] == [(1, 1), (2, 1)]


def test_heads_that_a_gpus_kernels_do_not_have_are_left_to_xla() -> None:
    backend = Backend.of_chip(chip_named("h200"))
    assert KeysAndValues(2, 512, None).backend(backend) == REFERENCE
    assert KeysAndValues(2, 256, None).backend(backend) == backend
    tpu = Backend.of_chip(chip_named("v6e"))
    assert KeysAndValues(2, 512, None).backend(tpu) == tpu
    # Each group of layers for itself: these pages are padded for kernels, and those are not.
    assert [KeysAndValues(1, size, None).pages(1, 2, 16, "bfloat16", backend).shape[-1] for size in (200, 500)] == [
        512,
        1000,
    ]


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (KVQuantization("float8_e4m3fn"), jnp.uint8),
        (KVQuantization("int8", by_token=True), jnp.int8),
        (KVQuantization("int8"), jnp.bfloat16),
        (None, jnp.bfloat16),
    ],
)
def test_drafts_have_no_codes_that_need_calibrated_scales(
    quantization: KVQuantization | None, dtype: DTypeLike
) -> None:
    draft = DraftCache(1, KeysAndValues(2, 64, None))
    shape = replace(SHAPE, draft=draft, quantization=quantization)
    *_, pages = shape.pages(spec_of(None), REFERENCE, make_mesh(MeshShape(1, 1), jax.devices()))
    assert codes_of(pages).dtype == dtype
