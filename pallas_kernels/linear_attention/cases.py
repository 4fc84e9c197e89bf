"""The realistic cases of states that kernels take tokens into: heads of models, and rows that steps give them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import RaggedRows

CONV_SIZE = 4


class StateCase:
    """A step of `num_tokens` tokens, padding included, with such rows, for states of any rule.

    There are as many tokens as rows where each row has one at most.
    """

    name: str
    rows: tuple[tuple[int, int], ...]  # the position of each row's first token, and the number of its tokens
    num_tokens: int
    page_size: int

    def __str__(self) -> str:
        return self.name

    @property
    def columns(self) -> int:
        """The columns of the longest row."""
        return max(1, *(-(-(start + count) // self.page_size) for start, count in self.rows))

    def ragged(self, page_table: jax.Array) -> RaggedRows:
        """Returns its rows, with such pages i32[R, columns]."""
        starts, counts = (jnp.asarray(numbers, jnp.int32) for numbers in zip(*self.rows, strict=True))
        return RaggedRows.build(page_table, starts, counts, self.num_tokens)


@dataclass(frozen=True)
class DeltaCase(StateCase):
    """States of `num_heads` key heads with `values_per_key` matrices each."""

    name: str
    num_heads: int
    values_per_key: int
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    page_size: int = 16
    size: int = 128  # of a key and of a value
    decays: int = 1  # of a token in a matrix; as many as rows where each forgets by itself (Kimi delta attention)

    @property
    def num_channels(self) -> int:
        """The channels of a query, a key, and the values that belong to it."""
        return (2 + self.values_per_key) * self.size

    @property
    def page_rows(self) -> int:
        """The rows of the page of a head: its matrices, and the window of its convolution."""
        window = (CONV_SIZE - 1) * (2 + self.values_per_key)
        return -(-(self.values_per_key * self.size + window) // 8) * 8


@dataclass(frozen=True)
class ScanCase(StateCase):
    """States of `num_groups` groups of Mamba-2, of `num_heads` heads of `head_size` by `state_size` each."""

    name: str
    num_groups: int
    num_heads: int  # of a group
    head_size: int
    state_size: int
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    page_size: int = 16

    @property
    def num_values(self) -> int:
        """The values of a group."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """The channels of a group: its values, B and C."""
        return self.num_values + 2 * self.state_size

    @property
    def page_rows(self) -> int:
        """The rows of the page of a group: its state, and the window of its convolution."""
        numbers = self.num_values * self.state_size + (CONV_SIZE - 1) * self.num_channels
        return -(-numbers // (8 * 128)) * 8


@dataclass(frozen=True)
class ChannelCase(StateCase):
    """States of `num_heads` blocks of channels, which know nothing of each other.

    Each channel has `size` numbers: those of a state of the first Mamba, or the tokens before in a short convolution.
    """

    name: str
    num_heads: int
    num_channels: int  # of a block
    size: int
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    page_size: int = 16

    @property
    def page_rows(self) -> int:
        """The rows of the page of a block."""
        return -(-self.num_channels * self.size // (8 * 128)) * 8


CASES = (
    DeltaCase("decode", 3, 2, ((5, 1), (0, 1), (0, 0), (16, 1)), 4),
    # The chunk of the first row ends in the second tile; the third one goes on within a column and reaches others.
    DeltaCase("mixed", 2, 1, ((0, 70), (9, 1), (9, 41), (0, 1), (31, 2)), 128),
    DeltaCase("by-channel", 1, 1, ((0, 37), (0, 1), (20, 5), (0, 0)), 48, decays=128),
    # A tile that ends within a register: a bucket may have any number of tokens, such as one more than 32 rows.
    DeltaCase("one-tile", 1, 2, ((0, 7), (6, 3), (8, 1), (0, 0)), 13),
    # Each row ends a column with its first token: no step of so many tokens has more visits.
    DeltaCase("every-row-ends-a-column", 1, 1, ((15, 2),) * 4, 8),
)
SCAN_CASES = (
    ScanCase("decode", 2, 2, 64, 128, ((5, 1), (0, 1), (0, 0), (16, 1)), 4),
    # Heads of 80 values do not end where registers do, and values of states of 256 have two rows each.
    ScanCase("mixed", 1, 8, 80, 256, ((0, 70), (9, 1), (9, 41), (0, 1), (31, 2)), 128),
    ScanCase("one-tile", 2, 4, 32, 128, ((0, 7), (6, 3), (8, 1), (0, 0)), 13),
)
CHANNEL_CASES = (
    ChannelCase("decode", 2, 384, 5, ((5, 1), (0, 1), (0, 0), (16, 1)), 4),
    ChannelCase("mixed", 1, 256, 3, ((0, 70), (9, 1), (9, 41), (0, 1), (31, 2)), 128),
)

# What models make of steps, for compilers.
SERVING = (
    DeltaCase("qwen3-next-decode-64", 16, 2, ((1000, 1),) * 64, 64),
    DeltaCase("qwen3-next-prompt-2048", 16, 2, ((0, 2048),), 2048),
    DeltaCase("qwen3-next-mixed-512", 16, 2, ((1000, 1),) * 32 + ((0, 480),), 512),
    DeltaCase("kimi-linear-decode-64", 32, 1, ((1000, 1),) * 64, 64, decays=128),
    DeltaCase("kimi-linear-prompt-512", 32, 1, ((0, 512),), 512, decays=128),
    DeltaCase("kimi-linear-prompt-1024", 32, 1, ((0, 1024),), 1024, decays=128),
    DeltaCase("qwen3-next-eighth-decode-64", 2, 2, ((1000, 1),) * 64, 64),
)

_DECODE, _PROMPT = ((1000, 1),) * 64, ((0, 512),)
SCAN_SERVING = (
    ScanCase("nemotron-h-decode-64", 8, 16, 64, 128, _DECODE, 64),
    ScanCase("nemotron-h-prompt-512", 8, 16, 64, 128, _PROMPT, 512),
    ScanCase("nemotron-h-prompt-1024", 8, 16, 64, 128, ((0, 1024),), 1024),
    ScanCase("nemotron-nano-decode-64", 8, 16, 80, 128, _DECODE, 64),
    ScanCase("nemotron-nano-mixed-512", 8, 16, 80, 128, ((1000, 1),) * 32 + ((0, 480),), 512),
    ScanCase("granite-4-decode-64", 1, 128, 64, 128, _DECODE, 64),
    ScanCase("granite-4-prompt-512", 1, 128, 64, 128, _PROMPT, 512),
    ScanCase("falcon-h1-decode-64", 2, 16, 128, 256, _DECODE, 64),
    ScanCase("falcon-h1-prompt-512", 2, 16, 128, 256, _PROMPT, 512),
)
CHANNEL_SERVING = (
    ChannelCase("jamba-decode-64", 8, 1024, 16, _DECODE, 64),
    ChannelCase("jamba-prompt-512", 8, 1024, 16, _PROMPT, 512),
    ChannelCase("mamba-2.8b-prompt-512", 8, 640, 16, _PROMPT, 512),
)
WINDOW_SERVING = (
    ChannelCase("jamba-window-decode-64", 8, 1024, 3, _DECODE, 64),
    ChannelCase("jamba-window-prompt-512", 8, 1024, 3, _PROMPT, 512),
    ChannelCase("lfm2-decode-64", 8, 256, 2, _DECODE, 64),
    ChannelCase("lfm2-prompt-512", 8, 256, 2, _PROMPT, 512),
)
