"""Chooses the forms of the matrices that a checkpoint stores in few bits, from what its files say."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import PLAIN, Form, Forms, Matrix
from jaxvllm.models.forms.choice import FewBitsForms, MatrixKey
from jaxvllm.models.forms.few_bits import FewBits, StoredAs
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.params import Layout, Params, declaration, declare, layer_stacks
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.stored_codes import Segments, joined
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import spread_boxes
from sharding.rules import MODEL, partition_spec

logger = logging.getLogger(__name__)


def held_forms(params: Params, spread: Spread) -> dict[MatrixKey, Form]:
    """Returns the forms of all arrays of a tree, by their names and layers."""
    layers = params["layers"]
    nodes: dict[MatrixKey, Any] = {(name, None): params[name] for name in declare(spread.whole)}
    for key, stack in layer_stacks(spread.whole).items():
        for layer in stack.layers:
            nodes[stack.name, layer] = layers[key] if isinstance(layers, dict) else layers[layer][stack.name]
    return {key: node.form if isinstance(node, Matrix) else PLAIN for key, node in nodes.items()}


def stored_forms(
    weights: StoredWeights, spread: Spread, layout: Layout, dtype: DTypeLike, forms: Forms
) -> dict[MatrixKey, FewBits]:
    """Returns the forms of the matrices that are kept as they are stored, by their names and layers.

    Matrices of one name and declaration in stacked layers have one form. Where the checkpoint stores them in several
    ways, as integers in some layers and in 16 bits in others, all are decoded, and the log says so. Layers with arrays
    of their own have forms of their own. Other matrices are decoded if no form keeps them in fewer bytes than the
    model's `dtype` takes.
    """

    def way(name: str, decl: ParamDecl, layers: Sequence[int | None]) -> StoredAs | Segments | None:
        inputs = decl.shape[-1]
        stored = [weights.stored(name, layer) for layer in layers]
        ways = [None if one is None else one.stored_as(inputs) for one in stored]
        if not any(ways):
            return None
        found: StoredAs | Segments | None
        if all(isinstance(one, Segments) for one in ways):
            found = ways[0] if len(set(ways)) == 1 else None
        else:
            found = joined((one if isinstance(one, StoredAs) else None for one in ways), inputs)
        if found is None:
            logger.info("%s is stored in several ways, so it is decoded in all %d layers", name, len(layers))
            return None
        return replace(found, rounds_tokens=weights.rounds_tokens) if isinstance(found, StoredAs) else found

    of_layers = _of_layers(spread)
    if layout == "separate":
        of_layers = [(name, decl, [layer]) for name, decl, layers in of_layers for layer in layers]
    return _forms([*_outside(spread), *of_layers], way, spread, dtype, forms)


def expected_forms(encoding: Encoding, spread: Spread, dtype: DTypeLike, forms: Forms) -> dict[MatrixKey, FewBits]:
    """Returns what `stored_forms` would, if the files store all matrices as the config tells."""
    kinds = [*(_outside(spread) if encoding.has_tables else []), *_of_layers(spread)]
    return _forms(kinds, lambda _, decl, __: encoding.usual(decl.storage), spread, dtype, forms)


# An array of our model, with its name and the layers that have it. None stands for outside the layers.
_Kind = tuple[str, ParamDecl, Sequence[int | None]]


def _outside(spread: Spread) -> list[_Kind]:
    return [(name, decl, [None]) for name, decl in declare(spread.whole).items()]


def _of_layers(spread: Spread) -> list[_Kind]:
    return [(stack.name, stack.decl, stack.layers) for stack in layer_stacks(spread.whole).values()]


def _forms(
    kinds: Iterable[_Kind],
    way: Callable[[str, ParamDecl, Sequence[int | None]], StoredAs | Segments | None],
    spread: Spread,
    dtype: DTypeLike,
    forms: Forms,
) -> dict[MatrixKey, FewBits]:
    """Returns the forms of the matrices among `kinds`, of which `way` tells how they are stored."""
    found: dict[MatrixKey, FewBits] = {}
    if forms.stored is None:
        return found
    for name, whole, layers in kinds:
        # An array that declares a dtype, such as a router, has that dtype, whatever a checkpoint stores.
        is_table = whole.storage in ("table", "tied_table")
        if not (is_table or whole.storage in ("matrix", "experts")) or whole.dtype is not None:
            continue
        decl = declaration(spread.spec, name, layers[0])
        stored = way(name, decl, layers)
        if isinstance(stored, Segments):
            form = _in_parts(stored, decl, whole, spread, forms.stored)
        else:
            form = None if stored is None else _form(stored, decl, whole, spread, forms.stored)
        if is_table:
            form = None if form is None else form.of_table(whole, dtype)
        if form is not None and form.saves(whole, dtype):
            found |= {(name, layer): form for layer in layers}
    return found


def _in_parts(
    stored: Segments, decl: ParamDecl, whole: ParamDecl, spread: Spread, forms: FewBitsForms
) -> FewBits | None:
    """Returns the form of a matrix that is stored in several ways, if devices divide none of its parts.

    Stacks of experts have none: each part would have some of the experts, and rows go to any of them.
    """
    if whole.storage == "experts" or decl.shape != whole.shape or MODEL in partition_spec((whole.axes[stored.axis],)):
        return None
    found = [(size, _form(way, decl, whole, spread, forms)) for size, way in stored.ways]
    parts = [(size, form) for size, form in found if form is not None]
    form = forms.in_parts(stored.axis, parts) if len(parts) == len(found) else None
    return None if form is None else form.of_matrix(whole)


def _form(stored: StoredAs, decl: ParamDecl, whole: ParamDecl, spread: Spread, forms: FewBitsForms) -> FewBits | None:
    """Returns the form of a matrix, whose declaration is `whole` where heads are copied and filled up for devices."""
    shards = spread.size if MODEL in partition_spec(whole.axes[-1:]) else 1
    inputs, group = whole.shape[-1] // shards, stored.group
    moves: list[int] = []
    # Where rows are divided, or their parts moved, a group must not have elements of two parts.
    if whole.shape[-1] != decl.shape[-1]:
        boxes = spread_boxes(decl, whole)
        moves = [number for box, origin in boxes for number in (box.start[-1], box.shape[-1], origin[-1])]
    if moves or (group is not None and not forms.fills_groups_up):
        group = math.gcd(inputs, *moves, group or 0)
    if stored.span is not None:
        stored = replace(stored, span=math.gcd(inputs, *moves, stored.span))
    if (inputs if group is None else group) % stored.code.per_byte:
        return None
    of_experts = whole.storage == "experts"
    form: FewBits | None = None
    if not stored.is_sorted:
        form = forms.of(stored, group, of_experts)
    elif shards == 1 and not moves and not of_experts:
        # Each device needs all inputs of a token. Each expert would have an order of its own.
        form = forms.in_order(replace(stored, is_sorted=False), group)
    form = None if form is None else form.of_matrix(whole)
    return form if form is not None and form.takes(whole) else None
