"""Groups of rows in plain XLA: a loop over tiles of rows, each of which belongs to one group."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

SMALLEST_TILE, LARGEST_TILE = 8, 128


def over_groups(x: jax.Array, starts: jax.Array, product: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Returns `product(tile, group)` of all rows of x [N, in], a tile of one group at a time: [N, ..].

    starts  # i32[G + 1]: rows starts[g] to starts[g + 1] are those of group g; what rows after the last one get is
    arbitrary

    Only groups with rows are visited, so only their matrices are read. A tile is always as long, whatever rows it has.
    """
    num_rows, num_groups = len(x), len(starts) - 1
    rows = _tile_rows(num_rows, num_groups)
    tiles = -(-jnp.diff(starts) // rows)  # of each group
    ends = jnp.cumsum(tiles)
    x = jnp.pad(x, ((0, rows), (0, 0)))  # the last tile may reach beyond
    out = jax.eval_shape(product, x[:rows], starts[0])
    result = jnp.zeros((len(x), *out.shape[1:]), out.dtype)

    def one(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, result = carry
        group = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
        first = starts[group] + (tile - (ends[group] - tiles[group])) * rows
        y = product(jax.lax.dynamic_slice_in_dim(x, first, rows), group)
        # Rows after those of the group belong to later tiles, which write them again.
        return tile + 1, jax.lax.dynamic_update_slice_in_dim(result, y, first, 0)

    num_tiles = ends[-1]
    _, result = jax.lax.while_loop(lambda carry: carry[0] < num_tiles, one, (jnp.zeros((), num_tiles.dtype), result))
    return result[:num_rows]


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Returns the rows of a tile: about those that a group has, a power of two."""
    rows = SMALLEST_TILE
    while rows < LARGEST_TILE and rows * num_groups < num_rows:
        rows *= 2
    return rows
