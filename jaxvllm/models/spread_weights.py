"""The arrays of a model that is spread over devices, part by part from those of the model as it is stored."""

from collections.abc import Iterator

from jaxvllm.models.params import ParamDecl
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import Box, Fill, Tile


def tiles(name: str, decl: ParamDecl, canonical: Fill, spread: Spread) -> list[Tile]:
    """What the array `name` of `spread.whole` is made of; `canonical` fills with that of `spread.spec`.

    `decl` declares the latter. Query heads and vocabulary that are filled up have no tiles: they are zeros.
    """
    return [Tile(box, canonical, origin) for box, origin in boxes(name, decl, spread)]


def boxes(name: str, decl: ParamDecl, spread: Spread) -> list[tuple[Box, tuple[int, ...]]]:
    """The boxes of those tiles, and where each begins in the array of `spread.spec`."""
    if spread.kv_copies == 1 or not {"heads", "kv_heads"} & set(decl.axes):
        return [(Box.whole(decl.shape), (0,) * len(decl.shape))]
    if name == "o":
        return list(_columns_of_heads(decl, spread))
    return list(_rows_of_heads(name, decl, spread))


def _shares(spread: Spread) -> Iterator[tuple[int, int, int, int]]:
    """Of each copy of each KV head: its place, the KV head, the first of its query heads, and how many it has."""
    G, share = spread.spec.group_size, spread.group_size
    for place in range(spread.whole.num_kv_heads):
        head, copy = divmod(place, spread.kv_copies)
        first = min(copy * share, G)
        yield place, head, first, min(share, G - first)


def _rows_of_heads(name: str, decl: ParamDecl, spread: Spread) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Boxes of [K, rows, ...], query heads first, and where each begins in the stored array."""
    D = spread.spec.head_size
    query_rows, own_rows = {"q_norm": (1, 0), "k_norm": (0, 1)}.get(name, (D, 2 * D))
    tail = decl.shape[2:]
    zeros = (0,) * len(tail)
    for place, head, first, count in _shares(spread):
        yield Box((place, 0, *zeros), (1, count * query_rows, *tail)), (head, first * query_rows, *zeros)
        own, stored = spread.group_size * query_rows, spread.spec.group_size * query_rows
        yield Box((place, own, *zeros), (1, own_rows, *tail)), (head, stored, *zeros)


def _columns_of_heads(decl: ParamDecl, spread: Spread) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Boxes of [E, H * D], and where each begins in the stored array."""
    E, D = decl.shape[0], spread.spec.head_size
    for place, head, first, count in _shares(spread):
        stored = head * spread.spec.group_size + first
        yield Box((0, place * spread.group_size * D), (E, count * D)), (0, stored * D)
