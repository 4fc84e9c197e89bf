"""Chooses the forms of the matrices that a checkpoint stores in few bits, from what its files say."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import PLAIN, Form, Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.few_bits import FewBits, StoredAs
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.params import Params, declaration, declare, layer_stacks
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.stored_codes import joined
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import spread_boxes
from sharding.rules import MODEL, partition_spec

logger = logging.getLogger(__name__)


def held_forms(params: Params, spread: Spread) -> dict[tuple[str, ParamDecl], Form]:
    """Returns the forms of all arrays of a tree, by their names and declarations."""
    decls, layers = declare(spread.whole), params["layers"]
    nodes = {(name, decl): params[name] for name, decl in decls.items()}
    for key, stack in layer_stacks(spread.whole).items():
        nodes[stack.name, stack.decl] = layers[key] if isinstance(layers, dict) else layers[stack.layers[0]][stack.name]
    return {key: node.form if isinstance(node, Matrix) else PLAIN for key, node in nodes.items()}


def stored_forms(
    weights: StoredWeights, spread: Spread, dtype: DTypeLike, forms: Forms
) -> dict[tuple[str, ParamDecl], FewBits]:
    """Returns the forms of the matrices that are kept as they are stored, by their names and declarations.

    Matrices of one name and declaration in several layers have one form, because a loop computes these layers. Where
    the checkpoint stores them in several ways, as integers in some layers and in 16 bits in others, all are decoded,
    and the log says so. Other matrices are decoded if no form keeps them in fewer bytes than the model's `dtype` takes.
    """

    def way(name: str, decl: ParamDecl, layers: Sequence[int | None]) -> StoredAs | None:
        inputs = decl.shape[-1]
        stored = [weights.stored(name, layer) for layer in layers]
        ways = [None if one is None else one.stored_as(inputs) for one in stored]
        if not any(ways):
            return None
        found = joined(ways, inputs)
        if found is None:
            logger.info("%s is stored in several ways, so it is decoded in all %d layers", name, len(layers))
            return None
        return replace(found, rounds_tokens=weights.rounds_tokens)

    outside = [(name, decl, [None]) for name, decl in declare(spread.whole).items()]
    return _forms([*outside, *_of_layers(spread)], way, spread, dtype, forms)


def expected_forms(
    encoding: Encoding, spread: Spread, dtype: DTypeLike, forms: Forms
) -> dict[tuple[str, ParamDecl], FewBits]:
    """Returns what `stored_forms` would, if the files store all matrices of the layers as the config tells."""
    return _forms(_of_layers(spread), lambda _, decl, __: encoding.usual(decl.storage), spread, dtype, forms)


# An array of our model, with its name and the layers that have it. None stands for outside the layers.
_Kind = tuple[str, ParamDecl, Sequence[int | None]]


def _of_layers(spread: Spread) -> list[_Kind]:
    return [(stack.name, stack.decl, stack.layers) for stack in layer_stacks(spread.whole).values()]


def _forms(
    kinds: Iterable[_Kind],
    way: Callable[[str, ParamDecl, Sequence[int | None]], StoredAs | None],
    spread: Spread,
    dtype: DTypeLike,
    forms: Forms,
) -> dict[tuple[str, ParamDecl], FewBits]:
    """Returns the forms of the matrices among `kinds`, of which `way` tells how they are stored."""
    found: dict[tuple[str, ParamDecl], FewBits] = {}
    if forms.stored is None:
        return found
    for name, whole, layers in kinds:
        # An array that declares a dtype, such as a router, has that dtype, whatever a checkpoint stores.
        if whole.storage not in ("matrix", "experts") or whole.dtype is not None:
            continue
        decl = declaration(spread.spec, name, layers[0])
        stored = way(name, decl, layers)
        form = None if stored is None else _form(stored, decl, whole, spread, forms.stored)
        if form is not None and form.saves(whole, dtype):
            found[name, whole] = form
    return found


def _form(stored: StoredAs, decl: ParamDecl, whole: ParamDecl, spread: Spread, forms: FewBitsForms) -> FewBits | None:
    """Returns the form of a matrix, whose declaration is `whole` where heads are copied and filled up for devices."""
    shards = spread.size if MODEL in partition_spec(whole.axes[-1:]) else 1
    inputs, group = whole.shape[-1] // shards, stored.group
    # Where rows are divided, or their parts moved, a group must not have elements of two parts.
    if whole.shape[-1] != decl.shape[-1]:
        moved = [(box.start[-1], box.shape[-1], origin[-1]) for box, origin in spread_boxes(decl, whole)]
        group = math.gcd(inputs, *(number for numbers in moved for number in numbers), group or 0)
    elif group is not None and not forms.fills_groups_up:
        group = math.gcd(inputs, group)
    if (inputs if group is None else group) % stored.code.per_byte:
        return None
    form = forms.of(stored, group, of_experts=whole.storage == "experts")
    return form if form is not None and form.takes(whole) else None
