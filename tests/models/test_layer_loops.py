"""Layers that are alike are compiled once, whatever pattern they follow and however many they are."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.models.decoder import forward
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.layer_loops import Loop, known_windows, layer_loops
from jaxvllm.models.params import Layout, abstract_params
from jaxvllm.models.spec import ModelSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW
from sharding.placement import mesh_of
from tests.models.changed import in_windows
from tests.models.dense import dense_attend
from tests.models.test_spread import DEMO

pytestmark = pytest.mark.usefixtures("quick_fusions")


def windowed(*windows: int | None) -> ModelSpec:
    return in_windows(DEMO, *windows)


def first_dense(dense: int, rest: int) -> ModelSpec:
    """The layers of a DeepSeek, as far as their kinds go."""
    return with_ffns(windowed(*(None,) * (dense + rest)), [24] * dense + [8] * rest)


def with_ffns(spec: ModelSpec, sizes: list[int]) -> ModelSpec:
    ffns = [GatedFfn(DEMO.hidden_size, size) for size in sizes]
    layers = zip(spec.layers, ffns, strict=True)
    return replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer, ffn in layers))


GEMMA3 = (4, 4, 4, 4, 4, None)


@pytest.mark.parametrize(
    ("spec", "loops"),
    [
        (windowed(*(None,) * 28), [Loop(0, 1, (28,))]),
        (windowed(*(GEMMA3 * 11)[:62]), [Loop(0, 10, (5, 1)), Loop(60, 1, (2,))]),
        (windowed(*(4, None) * 13), [Loop(0, 13, (1, 1))]),
        (windowed(None, *(4, 4, None) * 3), [Loop(0, 3, (1, 2)), Loop(9, 1, (1,))]),
        (windowed(*(4,) * 9, *(None,) * 3), [Loop(0, 1, (9,)), Loop(9, 1, (3,))]),
        (first_dense(3, 58), [Loop(0, 1, (3,)), Loop(3, 1, (58,))]),
        # In no pattern: one loop, in which the window is a number like any other.
        (windowed(4, None, None, 4, 4, None, 4), [Loop(0, 1, (7,))]),
    ],
)
def test_runs_and_periods(spec: ModelSpec, loops: list[Loop]) -> None:
    assert list(layer_loops(spec.layers)) == loops


@given(st.lists(st.sampled_from([None, 4, 5]), min_size=1, max_size=24), st.integers(0, 2**24 - 1))
def test_every_layer_has_its_turn(windows: list[int | None], dense: int) -> None:
    sizes = [24 if dense >> i & 1 else 8 for i in range(len(windows))]
    spec = with_ffns(windowed(*windows), sizes)
    met: list[int] = []
    known = known_windows(spec)
    for loop in layer_loops(spec.layers):
        runs = [loop.layers_of(run) for run in range(len(loop.runs))]
        for turn in range(loop.count):
            met += [int(number) for run in runs for number in run[turn]]
        for run in runs:
            alike = [spec.layers[number] for number in run.flat]
            assert len({(layer.attention, layer.ffn) for layer in alike}) == 1
            windows_here = {NO_WINDOW if layer.window is None else layer.window for layer in alike}
            assert {known[number] for number in run.flat} == (windows_here if len(windows_here) == 1 else {None})
    assert met == list(range(spec.num_layers))


def traced(spec: ModelSpec, layout: Layout, attend: Any) -> Any:
    params = abstract_params(spec, jnp.float32, layout, mesh_of(jax.devices()[0]))
    tokens = jnp.zeros(5, jnp.int32)
    return jax.jit(lambda params: forward(params, spec, tokens, tokens, (), attend)).lower(params)


@pytest.mark.parametrize("layout", ["separate", "stacked"])
@pytest.mark.parametrize("windows", [GEMMA3 * 2 + (4,), (4, None, None, 4, 4, None, 4)])
def test_attend_knows_the_windows_that_layers_of_a_run_share(windows: tuple[int | None, ...], layout: Layout) -> None:
    spec, seen = windowed(*windows), set()

    def attend(kv: Any, given: LayerInput, q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> Any:
        seen.add(given.window if isinstance(given.window, int) else None)
        return q, kv

    traced(spec, layout, attend)
    assert seen == set(known_windows(spec)) == ({4, NO_WINDOW} if windows[:6] == GEMMA3 else {None})


SPECS = {
    "periods": (windowed(*GEMMA3 * 2, 4, 4), windowed(*GEMMA3 * 4, 4, 4)),
    "two runs": (first_dense(3, 12), first_dense(3, 24)),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_program_is_the_same_at_any_depth_but_for_its_numbers(name: str) -> None:
    shallow, deep = (traced(spec, "stacked", dense_attend).as_text() for spec in SPECS[name])
    assert shallow != deep

    def without_numbers(text: str) -> str:
        # Numbers of layers are constants, one of them a table.
        return re.sub(r'"0x[0-9A-F]*"|\[[\d, ]*\]|\d+', "N", text)

    assert without_numbers(shallow) == without_numbers(deep)


@pytest.mark.parametrize("name", SPECS)
def test_separate_arrays_cost_a_branch_each(name: str) -> None:
    shallow, deep = SPECS[name]
    lines = [len(traced(spec, "separate", dense_attend).as_text().splitlines()) for spec in (shallow, deep)]
    matmuls = 4 * (deep.num_layers - shallow.num_layers)
    assert 0 < lines[1] - lines[0] < 8 * matmuls
