"""The delta rule for TPUs: states go from their pages through VMEM, and back to the pages of the tokens' columns.

Both kernels go over visits (`visits.py`), for a block of key heads at a time. Pallas fetches the state of the next
visit, and writes that of the visit before, while this one is computed. The window of the convolution follows the
matrices in the page, so a token's channels are all that is read beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.tpu.blocks import DeltaBlocks, DeltaTokens, choose_blocks
from pallas_kernels.linear_attention.tpu.chunk import take_chunks
from pallas_kernels.linear_attention.tpu.single import take_singles
from pallas_kernels.linear_attention.visits import Visits

__all__ = ["DeltaBlocks", "DeltaTokens", "choose_blocks", "delta_rule"]


def delta_rule(
    pages: jax.Array,
    place: jax.Array | int,
    visits: Visits,
    tokens: DeltaTokens,
    *,
    blocks: DeltaBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Lets the states of a layer take in the tokens of a step by the gated delta rule (arXiv 2412.06464, 2510.26692).

    pages  # f32[L, P, K, S, 128]: of a key head, r matrices of 128 x 128, then the window of the convolution [W - 1, C]
    place: the layer's place in the pages

    Returns what is read after each token, f32[T, K, r, 128], zero for padding, and the pages, which are updated in
    place. Queries are divided by their length and by the root of 128, and keys by their length. `blocks` are those of
    `choose_blocks`.
    """
    options: dict[str, Any] = {"blocks": blocks, "chip": chip, "interpret": interpret}
    read, pages = take_singles(pages, place, visits.singles, tokens, **options)
    of_chunks: jax.Array | float = 0.0
    if visits.chunks is not None:
        of_chunks, pages = take_chunks(pages, place, visits.chunks, tokens, **options)
    # What a kernel returns for tokens that it did not visit may be NaN.
    others = jnp.where(visits.is_real[:, None, None], of_chunks, 0.0)
    return jnp.where(visits.is_single[:, None, None], read, others).reshape(*tokens.beta.shape, -1), pages
