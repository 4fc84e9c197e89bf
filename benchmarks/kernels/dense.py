"""What peers without raggedness can do: rows of one length, as dense arrays."""

from dataclasses import dataclass

from pallas_kernels.ragged_paged_attention import NO_WINDOW
from pallas_kernels.ragged_paged_attention.cases import RaggedCase


def require_plain(case: RaggedCase) -> None:
    """NotImplementedError for a case of more than causal attention."""
    if case.window != NO_WINDOW or case.soft_cap is not None or case.sinks or case.kv_dtype is not None:
        raise NotImplementedError("plain causal attention only: no window, soft cap, sinks or quantized KV")


@dataclass(frozen=True)
class DenseBatch:
    """`batch` rows of `query_len` queries, one or all of the `kv_len` tokens: [batch, query_len, H, D]."""

    batch: int
    query_len: int
    kv_len: int

    @property
    def is_causal(self) -> bool:
        """Whether a mask is needed: the one query of a decode row sees everything."""
        return self.query_len > 1

    @classmethod
    def of(cls, case: RaggedCase) -> "DenseBatch":
        """NotImplementedError: its rows differ, or it needs more than causal attention."""
        require_plain(case)
        first = case.rows[0]
        if set(case.rows) != {first} or first.query_len not in (1, first.kv_len):
            raise NotImplementedError("rows of one length only, with one query or all of them")
        if case.num_tokens != len(case.rows) * first.query_len:
            raise NotImplementedError("no padding")
        return cls(len(case.rows), first.query_len, first.kv_len)
