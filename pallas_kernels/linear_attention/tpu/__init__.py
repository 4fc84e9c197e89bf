"""States on TPUs: they go from their pages through VMEM, and back to the pages of the tokens' columns.

Each rule has two kernels. Both go over visits (`visits.py`), for a block of heads at a time (`calls.py`). The window of
the convolution follows the matrices in the page, so a token's channels are all that is read beside it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.channel_tokens import ChannelTokens, WindowTokens
from pallas_kernels.linear_attention.tpu.blocks import StateBlocks, channel_blocks, delta_blocks, scan_blocks
from pallas_kernels.linear_attention.tpu.channel_scan import channel_chunks, channel_singles
from pallas_kernels.linear_attention.tpu.delta_chunk import take_chunks
from pallas_kernels.linear_attention.tpu.delta_single import take_singles
from pallas_kernels.linear_attention.tpu.scan_chunk import scan_chunks
from pallas_kernels.linear_attention.tpu.scan_single import scan_singles
from pallas_kernels.linear_attention.tpu.tokens import DeltaTokens, ScanShape, ScanTokens
from pallas_kernels.linear_attention.tpu.window import window_chunks, window_singles
from pallas_kernels.linear_attention.visits import Visits

__all__ = [
    "ChannelTokens",
    "DeltaTokens",
    "ScanShape",
    "ScanTokens",
    "StateBlocks",
    "WindowTokens",
    "channel_blocks",
    "channel_scan",
    "delta_blocks",
    "delta_rule",
    "scan_blocks",
    "selective_scan",
    "short_convolution",
]


def delta_rule(
    pages: jax.Array,
    place: jax.Array | int,
    visits: Visits,
    tokens: DeltaTokens,
    *,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Lets the states of a layer take in the tokens of a step by the gated delta rule (arXiv 2412.06464, 2510.26692).

    pages  # f32[L, P, K, S, 128]: of a key head, r matrices of 128 x 128, then the window of the convolution [W - 1, C]
    place: the layer's place in the pages

    Returns what is read after each token, f32[T, K, r, 128], zero for padding, and the pages, which are updated in
    place. Queries are divided by their length and by the root of 128, and keys by their length. `blocks` are those of
    `delta_blocks`.
    """
    options: dict[str, Any] = {"blocks": blocks, "chip": chip, "interpret": interpret}
    read, pages = _taken_in(take_singles, take_chunks, pages, place, visits, tokens, options)
    return read.reshape(*tokens.beta.shape, -1), pages


def selective_scan(
    pages: jax.Array,
    place: jax.Array | int,
    visits: Visits,
    tokens: ScanTokens,
    *,
    shape: ScanShape,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Lets the states of a layer take in the tokens of a step as Mamba-2 does (arXiv 2405.21060).

    pages  # f32[L, P, K, R, 128]: of a group, a state [H, P, S], then the window of the convolution [W - 1, C]
    place: the layer's place in the pages

    Returns what is read after each token, f32[T, K, H, P], zero for padding, and the pages, which are updated in place.
    `blocks` are those of `scan_blocks`.
    """
    options: dict[str, Any] = {"shape": shape, "blocks": blocks, "chip": chip, "interpret": interpret}
    read, pages = _taken_in(scan_singles, scan_chunks, pages, place, visits, tokens, options)
    return read.reshape(*tokens.g.shape, -1), pages


def channel_scan(
    pages: jax.Array,
    place: jax.Array | int,
    visits: Visits,
    tokens: ChannelTokens,
    *,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Lets the states of a layer take in the tokens of a step as the first Mamba does (arXiv 2312.00752).

    pages  # f32[L, P, K, R, 128]: of a block of channels, a state [S, C]
    place: the layer's place in the pages

    Returns what is read after each token, f32[T, K, C], zero for padding, and the pages, which are updated in place.
    `blocks` are those of `channel_blocks`.
    """
    options: dict[str, Any] = {"blocks": blocks, "chip": chip, "interpret": interpret}
    return _taken_in(channel_singles, channel_chunks, pages, place, visits, tokens, options)


def short_convolution(
    pages: jax.Array,
    place: jax.Array | int,
    visits: Visits,
    tokens: WindowTokens,
    *,
    has_activation: bool,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Lets each channel of the tokens of a step be convolved with the tokens before it.

    pages  # f32[L, P, K, R, 128]: of a block of channels, the window of the convolution [W - 1, C]
    place: the layer's place in the pages
    has_activation: the results go through SiLU

    Returns what becomes of each token, f32[T, K, C], zero for padding, and the pages, which are updated in place.
    `blocks` are those of `channel_blocks`.
    """
    options: dict[str, Any] = {
        "has_activation": has_activation,
        "blocks": blocks,
        "chip": chip,
        "interpret": interpret,
    }
    return _taken_in(window_singles, window_chunks, pages, place, visits, tokens, options)


def _taken_in(
    take_singles: Callable[..., tuple[jax.Array, jax.Array]],
    take_chunks: Callable[..., tuple[jax.Array, jax.Array]],
    pages: jax.Array,
    place: jax.Array | int,
    visits: Visits,
    tokens: Any,
    options: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Calls both kernels of a rule, and returns what they read, [T, K, ..], and the pages."""
    read, pages = take_singles(pages, place, visits.singles, tokens, **options)
    others: jax.Array | float = 0.0
    # What a kernel returns for tokens that it did not visit may be NaN.
    if visits.chunks is not None:
        of_chunks, pages = take_chunks(pages, place, visits.chunks, tokens, **options)
        others = jnp.where(visits.is_real[:, None, None], of_chunks, 0.0)
    return jnp.where(visits.is_single[:, None, None], read, others), pages
