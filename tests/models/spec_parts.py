"""The parts that specs of families are made of, and few families that have all of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

from jaxvllm.models.block import Block
from jaxvllm.models.families import model_spec
from tests.models.fixture import FIXTURES, NAMES

# What a layer computes and adds up, and in which order.
SUMMED = ("attention", "ffn", "placement", "beside", "late")


def parts_of(value: Any, in_pairs: bool) -> frozenset[Any]:
    """The parts of a spec, such as the attention of a layer: each option and, with `in_pairs`, each pair of options.

    A layer adds up what its attention and its FFN have computed. Its other options divide nothing: each counts alone.
    """
    if isinstance(value, tuple):
        return frozenset().union(*(parts_of(one, in_pairs) for one in dict.fromkeys(value)))
    if not is_dataclass(value):
        return frozenset()
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    options = [(name, option(one)) for name, one in held.items()]
    together = [one for one in options if not isinstance(value, Block) or one[0] in SUMMED]
    found = {(type(value).__name__, *some) for some in (*zip(options), *combinations(together, 2 if in_pairs else 1))}
    return found | parts_of(
        tuple(one for one in held.values() if is_dataclass(one) or isinstance(one, tuple)), in_pairs
    )


def option(value: Any) -> Any:
    """What a part says of one of its own parts, of a number, or of a text. A single head divides as no others do."""
    if is_dataclass(value) or isinstance(value, tuple | list | dict):
        return type(value).__name__
    return value if isinstance(value, bool | str) or value in (None, 1) else "a number"


def with_all_parts(names: Sequence[str], begun: Iterable[str] = (), *, in_pairs: bool) -> list[str]:
    """Returns the names of families that have, together with those already `begun`, every part of all of them."""
    configs = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in names}
    parts = {name: parts_of(model_spec(config), in_pairs) for name, config in configs.items()}
    left = set().union(*parts.values()).difference(*(parts[name] for name in begun))
    chosen: list[str] = []
    while left:
        chosen.append(max(names, key=lambda name: len(parts[name] & left)))
        left -= parts[chosen[-1]]
    return sorted(chosen)


# Half of all families: these are computed on a mesh of four devices, with stacked layers.
ON_FOUR_DEVICES = with_all_parts(NAMES, in_pairs=True)
# All others are computed on one device, each layer with arrays of its own, and with them those that have options which
# none of the others has.
_OTHERS = sorted({*NAMES}.difference(ON_FOUR_DEVICES))
ON_ONE_DEVICE = sorted({*_OTHERS, *with_all_parts(NAMES, _OTHERS, in_pairs=False)})
