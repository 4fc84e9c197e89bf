"""The tree of parameters on devices, from arrays that arrive one layer at a time."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxvllm.models.params import Layout, ParamDecl, Params, build, stacked
from jaxvllm.models.spec import ModelSpec

# Where an array goes, a stack of layers too.
Where = Callable[[ParamDecl], NamedSharding]
# The array of that name of a layer, or, with None, outside the layers: in one part or several, each behind the others
# along the first dimension, and in its place and dtype already.
Parts = Callable[[str, ParamDecl, int | None], Iterator[jax.Array]]


def place_all(spec: ModelSpec, layout: Layout, dtype: DTypeLike, where: Where, parts: Parts) -> Params:
    """The tree of `spec`. Only arrays of a stacked layer may come in several parts.

    Each part is in its place before the next is asked for: a transfer or an update under way would keep its memory.
    """

    def leaf(name: str, decl: ParamDecl, held: tuple[int, ...] | None) -> jax.Array:
        if held is None or layout == "separate":
            [array] = parts(name, decl, held[0] if held else None)
            return jax.block_until_ready(array)
        whole = stacked(decl, len(held))
        zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=where(whole))
        put = jax.jit(_put, donate_argnums=0, out_shardings=where(whole))
        stack = zeros(whole.shape, jnp.dtype(dtype))
        for layer in held:
            first = 0
            for part in parts(name, decl, layer):
                stack = jax.block_until_ready(put(stack, part, np.int32(layer), np.int32(first)))
                first += len(part)
        return stack

    return build(spec, layout, leaf)


def _put(stack: jax.Array, part: jax.Array, layer: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(stack, part[None], (layer, first, *(0 for _ in part.shape[1:])))
