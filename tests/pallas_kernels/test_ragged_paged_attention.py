"""Ragged paged attention: the reference in every case, and what is refused whatever the backend."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import (
    NO_WINDOW,
    KVQuantization,
    RaggedRows,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.cases import CASES, SERVING, RaggedCase, RowCase
from tests.pallas_kernels.attention_call import LAYER, Call, make_call
from tests.pallas_kernels.attention_suite import DECODE, MIXED, CompiledSuite, run


def swap_k_and_v(call: Call) -> Call:
    return replace(call, k=call.v, v=call.k, pages=np.roll(call.pages, call.pages.shape[-1] // 2, -1))


def k_for_v(call: Call) -> Call:
    # JAX's own test of paged attention passes with this.
    pages, width = call.pages.copy(), call.pages.shape[-1] // 2
    pages[..., width:] = pages[..., :width]
    return replace(call, v=call.k, pages=pages)


def swap_pages_of_the_first_row(call: Call) -> Call:
    # Row 0 sees positions 267 to 299: the end of page 16, all of page 17. Two pages seen whole could be swapped.
    table = call.table.copy()
    table[0, [16, 17]] = table[0, [17, 16]]
    return replace(call, table=table)


class TestReference(CompiledSuite):
    """The cases, and that a mistake in them would be seen.

    What is compared, with what and how is the same for all kernels that compute in a dtype, so interpreters, which
    would take a minute, need not see it again.
    """

    backend = "reference"

    # A mutation must be so many times worse than what is allowed.
    @pytest.mark.parametrize(("dtype", "visible"), [(np.float32, 100), (np.float16, 5)], ids=["float32", "float16"])
    @pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
    def test_the_metric_sees_mutations(self, case: RaggedCase, dtype: Any, visible: float) -> None:
        call, run_it = self.call(case, dtype), partial(run, name=self.backend)
        shorter = replace(call.rows, kv_lens=jnp.maximum(call.rows.kv_lens - case.page_size, 0))
        mutated = {
            "k and v swapped": run_it(swap_k_and_v(call)),
            "k read for v": run_it(k_for_v(call)),
            "last page dropped": run_it(call, rows=shorter),
            "pages out of order": run_it(swap_pages_of_the_first_row(call)),
            "window one longer": run_it(call, window=case.window + 1),
            "window one shorter": run_it(call, window=case.window - 1),
            "wrong layer": run_it(call, layer=LAYER + 1),
            "scale": run_it(call, q=(call.q * 1.1).astype(call.q.dtype)),
        }
        assert call.error(run_it(call)[0]) < call.tolerance
        errors = {name: call.error(out) for name, (out, _) in mutated.items()}
        assert min(errors.values()) > visible * call.tolerance, errors


def test_which_token_belongs_to_which_row() -> None:
    table = jnp.zeros((4, 1), jnp.int32)
    starts, lengths = np.asarray([7, 0, 20, 0], np.int32), jnp.asarray([1, 0, 3, 0], jnp.int32)
    mixed = RaggedRows.build(table, starts, lengths, 6)
    assert not mixed.decode_only
    assert mixed.query_starts.tolist() == [0, 1, 1, 4, 4]
    assert mixed.query_lens().tolist() == [1, 0, 3, 0]
    assert mixed.kv_lens.tolist() == [8, 0, 23, 0]
    assert mixed.token_rows.tolist() == [0, 2, 2, 2, 3, 3]
    assert mixed.positions.tolist() == [7, 20, 21, 22, 0, 0]
    assert mixed.is_real().tolist() == [True] * 4 + [False] * 2
    decode = RaggedRows.build(table, starts, jnp.minimum(lengths, 1), 4)
    assert decode.decode_only
    assert decode.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert decode.query_lens().tolist() == [1, 0, 1, 0]
    assert decode.positions.tolist() == [7, 0, 20, 0]
    assert decode.is_real().tolist() == [True, False, True, False]


def abstract_call(quantization: KVQuantization | None = None, **changes: Any) -> Any:
    """The shapes that a call of MIXED returns, some arguments replaced by (shape, dtype)."""
    call = make_call(MIXED)
    names = ("q", "k", "v", "pages")
    specs = {name: (getattr(call, name).shape, jnp.float32) for name in names} | changes
    structs = {name: jax.ShapeDtypeStruct(*spec) for name, spec in specs.items()}
    positional = [structs.pop(name) for name in names]
    return jax.eval_shape(
        partial(ragged_paged_attention, scale=1.0, window=NO_WINDOW, quantization=quantization),
        *positional,
        LAYER,
        call.rows,
        **structs,
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"k": (48, 1, 16)}, "do not fit pages of 2 heads"),
        ({"v": (48, 2, 12)}, "do not fit pages of 2 heads"),
        ({"q": (48, 4, 12), "k": (48, 2, 12), "v": (48, 2, 12)}, "pages must be 24 wide"),
        ({"q": (48, 3, 16)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"q": (47, 4, 16), "k": (47, 2, 16), "v": (47, 2, 16)}, "rows describe 48 tokens, q has 47"),
        ({"q": (48, 64)}, r"q must be \[tokens, query heads, head size\]"),
        ({"pages": (3, 9, 2, 24, 32)}, r"pages must hold one of \(16, 32, 64, 128\) tokens, not 24"),
        ({"pages": (3, 9, 2, 2, 16, 32)}, r"pages must be \[layers, pages, KV heads"),
        ({"sinks": (2,)}, "one logit for each of 4 query heads"),
        ({"slopes": (2,)}, "one number for each of 4 query heads"),
        ({"kv_scales": (2, 2)}, "kv_scales are for quantized pages"),
    ],
)
def test_shapes_that_do_not_agree_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abstract_call(**{name: (shape, jnp.float32) for name, shape in shapes.items()})


def test_a_page_table_of_other_rows_is_refused() -> None:
    call = make_call(MIXED)
    rows = replace(call.rows, page_table=call.rows.page_table[:-1])
    with pytest.raises(ValueError, match=r"a page table \(2, 32\) .* do not fit 3 rows"):
        run(call, "reference", rows=rows)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"q": jnp.bfloat16}, "dtypes differ: q bfloat16, k float32"),
        ({"pages": jnp.bfloat16}, "pages must be of q's dtype float32, not bfloat16"),
    ],
)
def test_dtypes_that_differ_are_refused(dtypes: dict[str, Any], message: str) -> None:
    call = make_call(MIXED)
    with pytest.raises(ValueError, match=message):
        abstract_call(**{name: (getattr(call, name).shape, dtype) for name, dtype in dtypes.items()})


def test_scales_of_other_heads_are_refused() -> None:
    pages = (make_call(MIXED).pages.shape, jnp.int8)
    abstract_call(KVQuantization("int8"), pages=pages, kv_scales=((2, 2), jnp.float32))
    with pytest.raises(ValueError, match=r"kv_scales must be \[2, 2\]"):
        abstract_call(KVQuantization("int8"), pages=pages, kv_scales=((2, 4), jnp.float32))


def test_pages_that_are_not_in_the_form_of_the_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="pages must be of uint8, as the backend reference holds codes, not float8"):
        abstract_call(KVQuantization("float8_e4m3fn"), pages=(make_call(MIXED).pages.shape, jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="pages must be ScaledPages where each token has scales of its own"):
        abstract_call(KVQuantization("int8", by_token=True), pages=(make_call(MIXED).pages.shape, jnp.int8))


def test_scales_of_other_pages_are_refused() -> None:
    call = make_call(replace(MIXED, kv_dtype="int8", by_token=True))
    pages = call.pages._replace(scales=call.pages.scales[..., :8])
    with pytest.raises(ValueError, match=r"the scales of tokens must be \(3, \d+, 2, 2, 16\)"):
        run(call, "reference", pages=pages)


@pytest.mark.parametrize(
    ("option", "message"),
    [({"soft_cap": 0.0}, "soft_cap must be above 0, not 0.0"), ({"window": 0}, "window must be at least 1")],
)
def test_options_that_mean_nothing_are_refused(option: dict[str, Any], message: str) -> None:
    call = make_call(MIXED)
    options = {"scale": 1.0, "window": NO_WINDOW} | option
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(call.q, call.k, call.v, call.pages, LAYER, call.rows, **options)


@pytest.mark.parametrize("lengths", [(2, 1), (0, 1), (-1, 3)])
def test_a_row_that_cannot_be_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a row needs"):
        RowCase(*lengths)


def test_a_case_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="case small: 3 queries in 1 rows, 2 tokens"):
        RaggedCase("small", 4, 2, 16, 16, 2, (RowCase(3, 3),))


def test_the_cases_cover_what_they_promise() -> None:
    rows = [row for case in CASES for row in case.rows]
    assert len({case.name for case in CASES + SERVING}) == len(CASES + SERVING)
    assert {16, 32, 64, 128} <= {case.page_size for case in CASES}
    assert any(case.is_decode for case in CASES) and any(not case.is_decode for case in CASES)
    assert any(case.window < 64 for case in CASES)
    assert any(row.kv_len == 256 for row in rows) and any(row.kv_len > 1024 for row in rows)
    for form in (True, False):
        alike = [case for case in CASES if case.is_decode is form]
        assert any(case.sinks for case in alike) and any(case.slopes for case in alike)
        assert {"int8", "float8_e4m3fn"} <= {case.kv_dtype for case in alike}
