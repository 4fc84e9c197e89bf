"""One list of realistic ragged batches, which tests, deviceless compilation, benchmarks and tuning all read.

Heads and pages are those of real models or of one tensor-parallel shard of them. In `CASES`, contexts are short enough
for a float64 oracle on a laptop, and lie around the sizes at which implementations split: pages, chunks of 256, tiles
of 64. Where heads, tokens and rows say nothing of a case, they are another case's: tests compile one program for both.
`SERVING` has the sizes that a GPU or TPU serves, for compilers and clocks.
"""

from dataclasses import dataclass

from pallas_kernels.ragged_paged_attention.quantize import Codes, KVQuantization
from pallas_kernels.ragged_paged_attention.rows import NO_WINDOW

SERVING_PAGE_SIZE = 64


@dataclass(frozen=True)
class RowCase:
    """A row that computes the last `query_len` of `kv_len` tokens. A padding row has 0 for both."""

    query_len: int
    kv_len: int

    def __post_init__(self) -> None:
        if not 0 <= self.query_len <= self.kv_len or (self.query_len == 0 < self.kv_len):
            raise ValueError(f"a row needs 0 < query_len <= kv_len or zeros, got {self.query_len} of {self.kv_len}")


@dataclass(frozen=True)
class RaggedCase:
    """One call. If it has as many tokens as rows, it has the decode form, where row r owns token r."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    num_tokens: int  # padding included
    rows: tuple[RowCase, ...]
    window: int = NO_WINDOW
    soft_cap: float | None = None
    sinks: bool = False
    slopes: bool = False
    kv_dtype: Codes | None = None  # of the pages; None: that of the queries
    by_token: bool = False  # each token has scales of its own
    latent_size: int | None = None  # of values that are the end of their keys

    def __post_init__(self) -> None:
        used = sum(row.query_len for row in self.rows)
        if self.num_tokens < max(used, len(self.rows)) or self.num_heads % self.num_kv_heads:
            raise ValueError(f"case {self.name}: {used} queries in {len(self.rows)} rows, {self.num_tokens} tokens")

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == len(self.rows)

    @property
    def scale(self) -> float:
        """The factor of q . k."""
        return self.head_size**-0.5

    @property
    def quantization(self) -> KVQuantization | None:
        return None if self.kv_dtype is None else KVQuantization(self.kv_dtype, self.by_token)

    @property
    def value_size(self) -> int:
        """The size of a value, and of what a query head returns."""
        return self.latent_size or self.head_size

    @property
    def token_elements(self) -> int:
        """The numbers that pages keep of a token, of all KV heads, without scales."""
        beside = 0 if self.latent_size else self.value_size
        return self.num_kv_heads * (self.head_size + beside)

    @property
    def token_scales(self) -> int:
        """The scales that pages keep of a token, of all KV heads."""
        return self.num_kv_heads * (1 if self.latent_size else 2) if self.by_token else 0

    @property
    def max_pages(self) -> int:
        """The columns of the page table: one more than the longest row fills."""
        return max(-(-row.kv_len // self.page_size) for row in self.rows) + 1

    @property
    def num_pages(self) -> int:
        """The pages of the pool: the trash page, those that rows own, and one without an owner."""
        return 2 + sum(-(-row.kv_len // self.page_size) for row in self.rows)

    def first_token(self, row: int) -> int:
        """Returns the number of the first query of `row`."""
        return row if self.is_decode else sum(r.query_len for r in self.rows[:row])

    def __str__(self) -> str:
        return self.name


def _rows(*lengths: tuple[int, int]) -> tuple[RowCase, ...]:
    return tuple(RowCase(query_len, kv_len) for query_len, kv_len in lengths)


CASES = (
    # The demo model: 7 heads over one, a head size that fills no vector register.
    RaggedCase("decode-mqa", 7, 1, 12, 16, 8,
               _rows((1, 3), (1, 256), (1, 700), (0, 0), (1, 1), (1, 257), (0, 0), (1, 65))),
    # Llama 3 8B on four devices.
    RaggedCase("decode-gqa", 8, 2, 128, 16, 4, _rows((1, 17), (1, 512), (1, 16), (1, 1025))),
    RaggedCase("decode-window", 4, 2, 16, 16, 6,
               _rows((1, 490), (1, 32), (1, 33), (1, 1), (0, 0), (1, 320)), window=32),
    # Decode rows come first, as the scheduler plans them.
    RaggedCase("mixed-mqa", 7, 1, 12, 16, 256, _rows((1, 3), (1, 500), (5, 40), (70, 70), (64, 300), (0, 0))),
    # The rows are in any order, with empty rows between them, and fill the bucket to the last token.
    RaggedCase("mixed-any-order", 6, 2, 16, 32, 136,
               _rows((0, 0), (65, 65), (1, 256), (2, 260), (0, 0), (63, 400), (1, 1), (4, 4))),
    RaggedCase("mixed-window", 6, 2, 16, 32, 136,
               _rows((1, 700), (40, 600), (1, 5), (50, 50), (0, 0), (0, 0), (0, 0), (0, 0)), window=20),
    # Both windows begin at position 255, the last one of a chunk, and no other row reads that chunk.
    RaggedCase("mixed-window-from-the-end-of-a-chunk", 4, 2, 16, 16, 48,
               _rows((1, 295), (30, 324), (0, 0)), window=40),
    # A window longer than a chunk, not a multiple of anything, that the last positions of a row begin to lose; and a
    # soft cap like Gemma 2's.
    RaggedCase("mixed-soft-cap", 4, 2, 64, 16, 72,
               _rows((1, 490), (30, 330), (33, 33), (0, 0), (0, 0)), window=300, soft_cap=5.0),
    # gpt-oss on eight devices: half of its layers have this window, all of them sinks.
    RaggedCase("decode-sinks", 8, 1, 64, 16, 4, _rows((1, 300), (1, 1), (0, 0), (1, 129)), window=128, sinks=True),
    RaggedCase("mixed-sinks", 8, 1, 64, 64, 64, _rows((1, 200), (40, 70), (3, 3)), sinks=True),
    # BLOOM 560M and MPT 7B on eight devices, and a group of heads whose sinks do not move with their logits.
    RaggedCase("decode-slopes", 4, 4, 64, 16, 3, _rows((1, 300), (0, 0), (1, 33)), slopes=True),
    RaggedCase("mixed-slopes", 4, 2, 64, 16, 72, _rows((1, 490), (30, 330), (4, 40)), window=300, sinks=True,
               slopes=True),
    # Gemma 2 9B on eight devices.
    RaggedCase("mixed-wide-heads", 2, 1, 256, 16, 40, _rows((1, 150), (33, 90), (2, 40)), window=64, soft_cap=50.0),
    RaggedCase("decode-int8", 8, 2, 128, 32, 3, _rows((1, 17), (1, 300), (1, 64)), kv_dtype="int8"),
    RaggedCase("mixed-int8", 8, 2, 64, 32, 64, _rows((1, 90), (40, 170), (2, 2)), kv_dtype="int8"),
    RaggedCase("decode-fp8", 8, 2, 128, 32, 3, _rows((1, 17), (1, 300), (1, 64)), kv_dtype="float8_e4m3fn"),
    # One query head a KV head.
    RaggedCase("decode-mha-e5m2", 4, 4, 64, 32, 3, _rows((1, 33), (0, 0), (1, 200)), kv_dtype="float8_e5m2"),
    RaggedCase("mixed-fp8", 8, 2, 64, 32, 64, _rows((1, 90), (40, 170), (2, 2)), sinks=True,
               kv_dtype="float8_e4m3fn"),
    RaggedCase("prefill-whole", 14, 2, 64, 16, 200, _rows((200, 200))),
    RaggedCase("prefill-chunk", 2, 2, 64, 128, 144, _rows((130, 770), (0, 0), (0, 0), (0, 0))),
    # A few drafts a row to verify.
    RaggedCase("verify-drafts", 2, 2, 64, 128, 144, _rows((4, 300), (3, 129), (4, 4), (4, 256))),
    # Up to seven drafts each: rows have all of them, are near their limit, have ended, or had no guess. They begin and
    # end around pages, the window and the end of a chunk.
    RaggedCase("verify-window-soft-cap", 4, 2, 64, 16, 72,
               _rows((8, 260), (2, 33), (0, 0), (5, 5), (1, 41)), window=36, soft_cap=5.0),
    RaggedCase("verify-int8", 8, 2, 64, 32, 64, _rows((8, 96), (7, 263), (6, 33)), kv_dtype="int8"),
    # DeepSeek V3 on 32 devices, and sizes that fill no vector register.
    RaggedCase("decode-latent", 4, 1, 576, 16, 4, _rows((1, 17), (1, 300), (0, 0), (1, 64)), latent_size=512),
    RaggedCase("mixed-latent", 7, 1, 40, 32, 64, _rows((1, 90), (40, 170), (2, 2)), latent_size=24),
    RaggedCase("one-token-in-a-large-bucket", 4, 2, 16, 16, 48, _rows((1, 100), (0, 0), (0, 0))),
)  # fmt: skip


def _serving() -> tuple[RaggedCase, ...]:
    """Returns decode at every batch size and context, and prefill of one prompt, for 8B to 70B models (8 KV heads).

    Others have latents, with the heads of DeepSeek V3 on eight devices and on one, and of GLM-4.7-Flash; the last ones
    have codes of eight bits.
    """
    shapes = [(heads, head_size) for head_size in (128, 64) for heads in (8, 32, 64)]
    kinds: tuple[tuple[str, Codes, bool], ...] = (
        ("int8", "int8", False),
        ("int8", "int8", True),
        ("fp8", "float8_e4m3fn", False),
        ("fp8", "float8_e4m3fn", True),
        ("e5m2", "float8_e5m2", False),
    )
    decodes = [(batch, context) for batch in (1, 8, 64, 256) for context in (512, 4096, 32768)]
    return tuple(
        RaggedCase(
            f"decode-{batch}x{context}-q{heads}-d{head_size}", heads, 8, head_size, SERVING_PAGE_SIZE, batch,
            (RowCase(1, context),) * batch,
        )
        for heads, head_size in shapes
        for batch, context in decodes
    ) + tuple(
        RaggedCase(
            f"prefill-{tokens}-q{heads}-d{head_size}", heads, 8, head_size, SERVING_PAGE_SIZE, tokens,
            (RowCase(tokens, tokens),),
        )
        for heads, head_size in shapes
        for tokens in (512, 2048, 8192)
    ) + tuple(
        RaggedCase(
            f"{name}-q{heads}-latent", heads, 1, 576, SERVING_PAGE_SIZE, len(rows) * rows[0].query_len, rows,
            latent_size=512,
        )
        for name, rows, all_heads in (
            ("decode-64x4096", (RowCase(1, 4096),) * 64, (16, 20, 128)),
            ("decode-1x32768", (RowCase(1, 32768),), (16, 20, 128)),
            # Queries of 128 heads would be as large as pages with which a copy of a layer's is found.
            ("prefill-2048", (RowCase(2048, 2048),), (16, 20)),
            ("prefill-512-of-8192", (RowCase(512, 8192),), (16, 20, 128)),
        )
        for heads in all_heads
    ) + tuple(
        # Llama 3 8B, and DeepSeek V3 on eight devices.
        RaggedCase(
            f"{name}-{kind}{'-by-token' if by_token else ''}", heads, 1 if latent_size else 8,
            576 if latent_size else 128, SERVING_PAGE_SIZE, len(rows) * rows[0].query_len, rows, kv_dtype=codes,
            by_token=by_token, latent_size=latent_size,
        )
        for kind, codes, by_token in kinds
        for name, rows, heads, latent_size in (
            ("decode-64x4096-heads", (RowCase(1, 4096),) * 64, 32, None),
            ("prefill-2048-heads", (RowCase(2048, 2048),), 32, None),
            ("decode-64x4096-latent", (RowCase(1, 4096),) * 64, 16, 512),
        )
    ) + (
        # The engine's default, whose scales are the smallest copies.
        RaggedCase("decode-64x4096-pages-of-16-int8-by-token", 32, 8, 128, 16, 64, (RowCase(1, 4096),) * 64,
                   kv_dtype="int8", by_token=True),
        RaggedCase("decode-64x4096-q128-latent-fp8", 128, 1, 576, SERVING_PAGE_SIZE, 64, (RowCase(1, 4096),) * 64,
                   kv_dtype="float8_e4m3fn", latent_size=512),
    )  # fmt: skip


SERVING = _serving()
