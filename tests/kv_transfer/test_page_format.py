"""A page survives its way as bytes, and bytes that are no such page are refused with the reason."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxvllm.kv_transfer.page_format import PageFormat, WrongPage
from tests.kv_transfer.conftest import NAME, assert_same, some_page


@pytest.mark.parametrize("windowed", [False, True])
def test_a_page_survives_its_way(form: PageFormat, windowed: bool) -> None:
    page = some_page(form, 1, windowed=windowed)
    assert_same(form.decode(NAME, form.encode(NAME, page)), page)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16])
def test_small_floats_keep_their_bits(form: PageFormat, dtype: type) -> None:
    form = PageFormat("m", (replace(form.arrays[0], dtype=np.dtype(dtype)),))
    bits = np.random.default_rng(0).integers(0, 256, form.arrays[0].nbytes, np.uint8)
    page = form.page((bits.view(dtype).reshape(form.arrays[0].shape),))
    [array] = form.decode(NAME, form.encode(NAME, page)).arrays
    assert array is not None
    np.testing.assert_array_equal(array.view(np.uint8).ravel(), bits)


def test_an_engine_with_other_copies_of_its_heads_gets_the_same(form: PageFormat) -> None:
    """One that has each KV head four times reads what one with two copies wrote: heads lie side by side."""
    page = some_page(form, 1)
    held = form.held(page)
    assert held[1].shape == (1, 4, 4, 8)
    np.testing.assert_array_equal(held[1][:, 0], held[1][:, 1])
    assert_same(form.page(held), page)
    wider = replace(form, arrays=(form.arrays[0], replace(form.arrays[1], copies=4)))
    assert wider.fingerprint == form.fingerprint
    assert_same(wider.page(wider.held(form.decode(NAME, form.encode(NAME, page)))), page)


def test_the_room_for_layers_of_other_stages_does_not_travel(form: PageFormat) -> None:
    page = some_page(form, 1)
    stages = ((0, 2, 0), (1, 0, 0))  # the layers of each array that three stages have
    staged = replace(form, arrays=tuple(replace(of, stages=n) for of, n in zip(form.arrays, stages, strict=True)))
    assert staged.fingerprint == form.fingerprint
    held = staged.held(page)
    assert held[0].shape == (6, 3, 4, 8) and not held[0][:2].any() and not held[0][4:].any()
    assert held[1].shape == (3, 4, 4, 8) and held[1][0].any() and not held[1][1:].any()
    assert_same(form.decode(NAME, staged.encode(NAME, staged.page(held))), page)
    assert staged.held(some_page(form, 1, windowed=True))[1].shape == held[1].shape


def test_what_left_the_window_is_zero(form: PageFormat) -> None:
    assert not form.held(some_page(form, 1, windowed=True))[1].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(model="another"), "another model"),
        (dict(arrays="dtype"), "another model, dtype"),
        (dict(arrays="layers"), "another model, dtype"),
    ],
)
def test_pages_of_another_kind_are_refused(form: PageFormat, change: dict[str, str], reason: str) -> None:
    first, second = form.arrays
    others = {
        "dtype": (replace(first, dtype=np.dtype(np.int32)), second),
        "layers": (replace(first, num_layers=1), second),
    }
    arrays = others.get(change.get("arrays", ""), form.arrays)
    other = PageFormat(change.get("model", form.model), arrays)
    with pytest.raises(WrongPage, match=reason):
        other.decode(NAME, form.encode(NAME, some_page(form, 1)))


def test_pages_of_another_version_are_refused(form: PageFormat) -> None:
    data = bytearray(form.encode(NAME, some_page(form, 1)))
    data[8] += 1
    with pytest.raises(WrongPage, match="version 3"):
        form.decode(NAME, bytes(data))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 10**6), to=st.integers(0, 255), cut=st.integers(0, 10**6))
def test_damage_is_found_wherever_it_is(form: PageFormat, at: int, to: int, cut: int) -> None:
    whole = form.encode(NAME, some_page(form, 1))
    data = bytearray(whole)
    data[at % len(data)] = to
    if bytes(data) != whole:
        with pytest.raises(WrongPage):
            form.decode(NAME, bytes(data))
    with pytest.raises(WrongPage):
        form.decode(NAME, whole[: cut % len(whole)])
    with pytest.raises(WrongPage):
        form.decode(NAME, whole + b"more")


def test_a_page_of_another_name_is_refused(form: PageFormat) -> None:
    with pytest.raises(WrongPage, match="was asked for"):
        form.decode(bytes(32), form.encode(NAME, some_page(form, 1)))
