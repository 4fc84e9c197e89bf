"""Each device's shard of each array, read by itself."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.params import Layout, ParamDecl, declare, declare_layer
from jaxvllm.models.placing import Parts, Where
from jaxvllm.models.spread import Spread
from jaxvllm.models.spread_weights import tiles
from jaxvllm.models.tiling import Box, Fill, aligned_zeros, tiled

# What fills the array of that name of a layer, or, with None, outside the layers.
Weights = Callable[[str, int | None], Fill]


def read_shards(weights: Weights, spread: Spread, layout: Layout, dtype: DTypeLike, where: Where) -> Parts:
    """The arrays of `spread.whole`, from `weights` of `spread.spec`; only what this process's devices hold is read.

    The host has one array of one layer at a time, of a stacked layer gate and up one after the other. On CPU devices
    that is the array itself, not copied.
    """
    decls = declare(spread.spec) | declare_layer(spread.spec)

    def parts(name: str, whole: ParamDecl, layer: int | None) -> Iterator[jax.Array]:
        fill = tiled(tiles(name, decls[name], weights(name, layer), spread))
        for part in _halves(whole) if layout == "stacked" and layer is not None else [Box.whole(whole.shape)]:

            def shard(index: tuple[slice, ...] | None, part: Box = part) -> np.ndarray:
                assert index is not None
                box = Box.of_index(index, part.shape)
                out = aligned_zeros(box.shape, jnp.dtype(dtype))
                fill(out, box.moved(part.start).start)
                return out

            yield jax.make_array_from_callback(part.shape, where(whole), shard, dtype)

    return parts


def _halves(decl: ParamDecl) -> Iterator[Box]:
    """Gate and up apart, as they are tensors of their own; any other array whole."""
    axis, size = decl.axes[0], decl.shape[0]
    step = 1 if axis is None and len(decl.shape) > 1 else size
    for first in range(0, size, step):
        yield Box((first, *(0 for _ in decl.shape[1:])), (step, *decl.shape[1:]))
