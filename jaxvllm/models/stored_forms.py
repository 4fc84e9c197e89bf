"""Chooses the forms of the matrices that a checkpoint stores in few bits, from what its files say."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import PLAIN, Form, Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.forms.few_bits import FewBits
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.params import Params, declaration, declare, layer_stacks
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
    found: dict[tuple[str, ParamDecl], FewBits] = {}
    if forms.stored is None:
        return found
    kinds: list[tuple[str, ParamDecl, Sequence[int | None]]] = [
        *((name, decl, [None]) for name, decl in declare(spread.whole).items()),
        *((stack.name, stack.decl, stack.layers) for stack in layer_stacks(spread.whole).values()),
    ]
    for name, decl, layers in kinds:
        # An array that declares a dtype, such as a router, has that dtype, whatever a checkpoint stores.
        if decl.storage in ("matrix", "experts") and decl.dtype is None:
            form = _form(weights, spread, name, decl, layers, forms.stored)
            if form is not None and _num_bytes(form.declare(decl).values(), dtype) < _num_bytes([decl], dtype):
                found[name, decl] = form
    return found


def _form(
    weights: StoredWeights,
    spread: Spread,
    name: str,
    whole: ParamDecl,
    layers: Sequence[int | None],
    forms: FewBitsForms,
) -> FewBits | None:
    """Returns the form of a matrix of the same name in some layers."""
    decl = declaration(spread.spec, name, layers[0])
    inputs = decl.shape[-1]
    stored = [weights.stored(name, layer) for layer in layers]
    ways = [None if one is None else one.stored_as(inputs) for one in stored]
    if not any(ways):
        return None
    if (way := joined(ways, inputs)) is None:
        logger.info("%s is stored in several ways, so it is decoded in all %d layers", name, len(layers))
        return None
    # Where rows are divided, or their parts moved, a group must not have elements of two parts.
    shards = spread.size if MODEL in partition_spec(whole.axes[-1:]) else 1
    group = math.gcd(inputs if way.group is None else way.group, whole.shape[-1] // shards)
    if whole.shape[-1] != inputs:
        moved = [(box.start[-1], box.shape[-1], origin[-1]) for box, origin in spread_boxes(decl, whole)]
        group = math.gcd(group, *(number for numbers in moved for number in numbers))
    if group % way.code.per_byte:
        return None
    form = forms.of(replace(way, rounds_tokens=weights.rounds_tokens), group)
    return form if form is not None and form.takes(whole.shape[-1] // shards) else None


def _num_bytes(decls: Iterable[ParamDecl], dtype: DTypeLike) -> int:
    return sum(math.prod(decl.shape) * decl.dtype_in(dtype).itemsize for decl in decls)
