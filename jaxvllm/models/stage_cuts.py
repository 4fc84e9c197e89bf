"""Finds where the layers of a model may be divided among stages, and which division is most even."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from jaxvllm.models.block import Block
from jaxvllm.models.latent_attention import LatentAttention

# Stages after a division: how many layers the largest has, the sum of squares of these numbers, and where stages begin.
type Division = tuple[int, int, tuple[int, ...]]


def beginnings(layers: Sequence[Block]) -> tuple[int, ...]:
    """Returns the numbers of the layers with which a stage may begin.

    From there on no layer reads keys and values of a layer before it, or positions that an index before it has chosen.
    """
    found, least, needs_choice = [], len(layers), False
    for number, layer in reversed(list(enumerate(layers))):
        least = least if layer.reads is None else min(least, layer.reads)
        if isinstance(layer.attention, LatentAttention) and layer.attention.indexer is not None:
            needs_choice = layer.attention.indexer == "last"
        if least >= number and not needs_choice:
            found.append(number)
    return tuple(reversed(found))


@cache
def divided(begins: tuple[int, ...], num_layers: int, stages: int) -> tuple[range, ...]:
    """Returns the layers of each stage. Each begins with one of `begins`, the first of which is layer 0.

    The largest stage has as few layers as can be, because all wait for it. Where several divisions are as even, the
    earlier stages have more layers: 27 layers in two stages are 14 and 13.
    """
    assert 0 < stages <= len(begins), "each stage has a layer"
    # Good divisions of the layers from each beginning on, among more and more stages.
    rests: dict[int, Division] = {begin: (num_layers - begin, (num_layers - begin) ** 2, (begin,)) for begin in begins}
    for _ in range(stages - 1):
        rests = {
            begin: min((_before(begin, rest) for later, rest in rests.items() if later > begin), key=_cost)
            for begin in begins
            if begin < max(rests)
        }
    return tuple(range(*ends) for ends in pairwise((*rests[0][2], num_layers)))


def _before(begin: int, rest: Division) -> Division:
    """Returns the division with one more stage before the `rest`."""
    largest, squares, begins = rest
    size = begins[0] - begin
    return max(largest, size), squares + size**2, (begin, *begins)


def _cost(division: Division) -> tuple[int, int, int]:
    largest, squares, begins = division
    return largest, squares, -begins[1]
