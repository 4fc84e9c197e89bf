"""Dense batches for peers without ragged rows: all rows have one length."""

from dataclasses import dataclass

from pallas_kernels.ragged_paged_attention import NO_WINDOW
from pallas_kernels.ragged_paged_attention.cases import RaggedCase


def require_plain(case: RaggedCase) -> None:
    """Raises NotImplementedError for a case of more than causal attention."""
    if case.window != NO_WINDOW or case.soft_cap is not None or case.sinks or case.kv_dtype is not None:
        raise NotImplementedError("plain causal attention only: no window, soft cap, sinks or quantized KV")
    if case.latent_size is not None:
        raise NotImplementedError("keys beside values only, no latents")


@dataclass(frozen=True)
class DenseBatch:
    """`batch` rows of `query_len` queries, one or all of the `kv_len` tokens: [batch, query_len, H, D]."""

    batch: int
    query_len: int
    kv_len: int

    @property
    def is_causal(self) -> bool:
        """Whether a mask is needed. The one query of a decode row sees everything."""
        return self.query_len > 1

    @classmethod
    def of(cls, case: RaggedCase) -> "DenseBatch":
        """Makes the batch. Raises NotImplementedError if rows differ or more than causal attention is needed."""
        require_plain(case)
        first = case.rows[0]
        if set(case.rows) != {first} or first.query_len not in (1, first.kv_len):
            raise NotImplementedError("rows of one length only, with one query or all of them")
        if case.num_tokens != len(case.rows) * first.query_len:
            raise NotImplementedError("no padding")
        return cls(len(case.rows), first.query_len, first.kv_len)
