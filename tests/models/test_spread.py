"""How models come apart: sizes that divide, are made to, or are refused."""

import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.families import model_spec
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.layer_loops import layer_loops
from jaxvllm.models.params import declare_layer, layer_stacks
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.stage_cuts import divided
from tests.models.changed import changed, in_windows
from tests.models.fixture import Fixture

DEMO = model_spec(json.loads(Path(DEMO_MODEL, "config.json").read_text(encoding="utf-8")))


def spec_of(num_heads: int, num_kv_heads: int, ffn_size: int = 64, vocab_size: int = 100) -> ModelSpec:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return replace(changed(DEMO, heads, {"size": ffn_size}), vocab_size=vocab_size)


def sizes_of(spec: ModelSpec) -> dict[str, int]:
    """The sizes that are shared out among devices, which all layers have alike."""
    [layer] = set(spec.layers)
    assert isinstance(layer.attention, GroupedQueryAttention) and isinstance(layer.ffn, GatedFfn)
    heads = {"num_heads": layer.attention.num_heads, "num_kv_heads": layer.attention.num_kv_heads}
    return heads | {"ffn_size": layer.ffn.size, "vocab_size": spec.vocab_size}


@given(st.integers(1, 16), st.integers(1, 12), st.integers(1, 12), st.integers(1, 300))
def test_shares_are_equal_and_hold_the_model(num_kv_heads: int, group: int, size: int, vocab_size: int) -> None:
    spread = Spread(spec_of(num_kv_heads * group, num_kv_heads, 8 * size, vocab_size), size)
    whole, shard = sizes_of(spread.whole), sizes_of(spread.shard)
    assert {name: share * size for name, share in shard.items()} == whole
    assert group_of(shard) == group_of(whole)
    assert whole["num_kv_heads"] == num_kv_heads * spread.kv_copies
    # No query head is lost, and of what is filled in, less than one head for each copy of a KV head.
    assert 0 <= group_of(whole) * spread.kv_copies - group < spread.kv_copies
    assert spread.zero_heads == whole["num_heads"] - num_kv_heads * group
    assert 0 <= whole["vocab_size"] - vocab_size < size
    # As few copies as make the KV heads divide.
    assert all((num_kv_heads * copies) % size for copies in range(1, spread.kv_copies))


def group_of(sizes: dict[str, int]) -> int:
    return sizes["num_heads"] // sizes["num_kv_heads"]


def test_what_divides_stays_as_it_is() -> None:
    spec = spec_of(32, 8)
    assert Spread(spec, 1).whole == Spread(spec, 4).whole == spec
    assert Spread(spec, 4).shard == spec_of(8, 2, 16, 25)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "copies", "group"),
    [(7, 1, 2, 2, 4), (7, 1, 8, 8, 1), (28, 4, 8, 2, 4), (32, 8, 16, 2, 2), (9, 3, 2, 2, 2), (6, 2, 4, 2, 2)],
)
def test_heads_that_do_not_divide(heads: int, kv_heads: int, size: int, copies: int, group: int) -> None:
    spread = Spread(spec_of(heads, kv_heads, 64 * size), size)
    assert (spread.kv_copies, group_of(sizes_of(spread.whole))) == (copies, group)


def test_an_ffn_that_does_not_divide_is_refused_with_the_meshes_that_work() -> None:
    with pytest.raises(ValueError, match="FFN of size 36 does not divide over 8 devices: .*1x1, 1x2, 1x4, or"):
        Spread(spec_of(8, 8, ffn_size=36), 8)


def test_heads_that_are_normed_together_are_not_filled_up() -> None:
    spec = changed(spec_of(12, 4, 240), {"qk_norm": "full"})
    assert Spread(spec, 4).whole == spec and Spread(spec, 3).kv_copies == 3
    with pytest.raises(
        ValueError, match="12 query heads over 4 KV heads do not divide over 8 devices, and this .*1x1, 1x2, 1x4, or"
    ):
        Spread(spec, 8)


def layered(num_layers: int, windows: tuple[int | None, ...] = (None,)) -> ModelSpec:
    return in_windows(DEMO, *(windows * num_layers)[:num_layers])


GEMMA3 = (8, 8, 8, 8, 8, None)


@pytest.mark.parametrize(
    ("spec", "layers", "programs"),
    [
        (layered(28), [28], 1),
        (layered(28), [14, 14], 1),
        (layered(27), [14, 13], 2),
        (layered(30), [8, 8, 7, 7], 2),
        (layered(46, (8, None)), [23, 23], 2),  # Gemma 2 27B: one begins with a window, and the other does not
        (layered(48, GEMMA3), [6] * 8, 1),
        (layered(48, GEMMA3), [16] * 3, 3),
        (layered(4, (8, None, None, None)), [2, 2], 2),
        (layered(3), [1, 1, 1], 1),
    ],
)
def test_stages_have_equally_many_layers_or_one_fewer(spec: ModelSpec, layers: list[int], programs: int) -> None:
    spread = Spread(spec, 1, len(layers))
    assert [part.num_layers for part in spread.parts] == list(map(len, spread.stage_layers)) == layers
    assert len(set(spread.parts)) == programs
    assert tuple(layer for part in spread.parts for layer in part.layers) == spec.layers == spread.whole.layers
    assert {part.whole for part in spread.parts} == {spec}
    stacks = layer_stacks(spec)
    for part in spread.parts:
        own = layer_stacks(part)
        assert own.keys() == stacks.keys()
        for layer in range(part.num_layers):
            assert {stack.name for stack in own.values() if layer in stack.layers} == set(declare_layer(part, layer))


def test_a_stage_may_begin_within_a_pattern_whose_windows_are_known_all_the_same() -> None:
    spread = Spread(layered(62, GEMMA3), 1, 2)  # Gemma 3 27B
    for part in spread.parts:
        loops = layer_loops(part.layers, part.whole.layers)
        assert all(
            len({part.layers[number].window for number in loop.layers_of(run).flat}) == 1
            for loop in loops
            for run in range(len(loop.runs))
        )
    assert len(layer_loops(spread.parts[1].layers)) == 1, "alone, these layers would have no pattern"


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be divided among 4 .*: use a mesh of 1x2, 2x1x2$"):
        Spread(layered(3), 2, 4)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemma4", [1, 6]),  # layers 4 to 6 read 1 and 3
        ("gemma4-keys", [3, 3]),
        ("gemma3n", [1, 6]),
        ("glm_moe_dsa", [1, 3]),  # layers 2 and 3 attend to what the index of layer 1 has chosen
        ("longcat_flash", [1, 1, 1, 1]),  # of which stages hand on what comes late
    ],
)
def test_layers_that_read_others_are_in_the_stages_of_these(name: str, sizes: list[int]) -> None:
    spec = model_spec(Fixture.load(name).config)
    spread = Spread(spec, 1, len(sizes))
    assert [part.num_layers for part in spread.parts] == sizes
    for part, numbers in zip(spread.parts, spread.stage_layers, strict=True):
        own = [spec.layers[number] for number in numbers]
        assert [None if layer.reads is None else layer.reads + numbers.start for layer in part.layers] == [
            layer.reads for layer in own
        ]


def test_stages_that_would_part_layers_from_those_they_read_are_refused() -> None:
    for name in ("gemma4", "gemma3n", "glm_moe_dsa"):
        with pytest.raises(
            ValueError,
            match="among 3 stages so that each stage has some, with all layers that it reads from: .* 1x1, 2x1x1$",
        ):
            Spread(model_spec(Fixture.load(name).config), 1, 3)


@given(st.data())
def test_no_other_division_has_a_smaller_largest_stage(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 14))
    more = data.draw(st.sets(st.integers(1, num_layers - 1)) if num_layers > 1 else st.just(set()))
    begins = (0, *sorted(more))
    stages = data.draw(st.integers(1, len(begins)))
    found = divided(begins, num_layers, stages)
    assert [number for own in found for number in own] == list(range(num_layers))
    assert len(found) == stages and {own.start for own in found} <= set(begins)
    others = ([*ends, num_layers] for ends in combinations(begins[1:], stages - 1))
    least = min(max(end - begin for begin, end in pairwise([0, *ends])) for ends in others)
    assert max(map(len, found)) == least
    if len(begins) == num_layers:
        each, larger = divmod(num_layers, stages)
        assert list(map(len, found)) == [each + 1] * larger + [each] * (stages - larger)


def test_a_layer_reads_an_earlier_one_that_is_like_it() -> None:
    spec = model_spec(Fixture.load("gemma4").config)
    assert [layer.reads for layer in spec.layers] == [None, None, None, None, 1, 3, 1]

    def reading(source: int | None) -> ModelSpec:
        """The spec whose layer 4 reads another."""
        return replace(spec, layers=(*spec.layers[:4], replace(spec.layers[4], reads=source), *spec.layers[5:]))

    for wrong in (4, 5, 0, 6):  # itself, a later one, one with a window, one that reads itself
        with pytest.raises(ValueError, match=f"layer 4 cannot read layer {wrong}: it must be an earlier one like it"):
            reading(wrong)
    with pytest.raises(ValueError, match="layer 4 must either keep keys and values or read those of an earlier layer"):
        reading(None)
