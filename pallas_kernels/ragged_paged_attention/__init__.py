"""Attention for a batch in which every row has its own query length and its own paged KV length."""

from pallas_kernels.ragged_paged_attention.api import (
    choose_positions,
    must_choose,
    plan_rows,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.layout import (
    AbstractPages,
    KVPages,
    RowLayout,
    ScaledPages,
    backend_for,
    codes_of,
    kv_pages_struct,
)
from pallas_kernels.ragged_paged_attention.quantize import KVQuantization
from pallas_kernels.ragged_paged_attention.rows import NO_WINDOW, RaggedRows
from pallas_kernels.ragged_paged_attention.sparse import ChosenPositions, IndexQueries

__all__ = [
    "AbstractPages",
    "ChosenPositions",
    "IndexQueries",
    "NO_WINDOW",
    "KVPages",
    "KVQuantization",
    "RaggedRows",
    "RowLayout",
    "ScaledPages",
    "backend_for",
    "choose_positions",
    "codes_of",
    "kv_pages_struct",
    "must_choose",
    "plan_rows",
    "ragged_paged_attention",
]
