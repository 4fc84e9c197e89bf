"""Zeros after what each device has of a matrix, so that its rows and its inputs have the sizes that a kernel takes."""

import jax
import jax.numpy as jnp

from jaxvllm.models.tiling import Box, Fill, Tile, tiled


def rounded_up(size: int, unit: int) -> int:
    """Returns the least multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


def with_zeros(array: jax.Array, axis: int, parts: int, length: int) -> jax.Array:
    """Returns an array in which zeros follow each of some parts along an axis, so that it has that length."""
    axis %= array.ndim
    before, size, after = array.shape[:axis], array.shape[axis] // parts, array.shape[axis + 1 :]
    if size == length:
        return array
    more = [(0, 0)] * (array.ndim + 1)
    more[axis + 1] = (0, length - size)
    return jnp.pad(array.reshape(*before, parts, size, *after), more).reshape(*before, -1, *after)


def spread_fill(
    fill: Fill, lead: tuple[int, ...], sides: tuple[int, int], lengths: tuple[int, int], parts: tuple[int, int]
) -> Fill:
    """Returns the function that fills an array [*lead, .., ..] in which zeros follow what each device has.

    sides: the rows and columns that a device has of the array that `fill` fills
    lengths: those that it has with zeros
    parts: how many devices share rows out, and columns
    """
    if sides == lengths:
        return fill
    zeros = (0,) * len(lead)
    tiles = []
    for i in range(parts[0]):
        for j in range(parts[1]):
            box = Box((*zeros, i * lengths[0], j * lengths[1]), (*lead, *sides))
            tiles.append(Tile(box, fill, (*zeros, i * sides[0], j * sides[1])))
    return tiled(tiles)
