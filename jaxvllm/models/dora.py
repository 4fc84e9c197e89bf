"""The norms that DoRA (arXiv 2402.09353) divides by: those of the rows of W + B A, computed where the matrices are.

A matrix W may be in any form. One that its form holds exactly is read as it is. The columns of any other are its
products with unit vectors, as the step computes them: rounding leaves such tokens as they are. That takes as much
arithmetic as a prompt of as many tokens as the matrix has inputs. Sums are in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.block import Block
from jaxvllm.models.expert_lora import ExpertLora
from jaxvllm.models.forms.few_bits import FewBits
from jaxvllm.models.forms.form import Arrays, Form, item_of
from jaxvllm.models.layer_input import Scalar
from jaxvllm.models.layer_loops import over_layers
from jaxvllm.models.lora import DOWN, LAYERS, LORA, RATIO, UP, layers_with_lora
from jaxvllm.models.ops import Adapted, InStack, OneOf, Slice, Weight, by_form, matrices_at
from jaxvllm.models.params import LayerStack, Params, layer_stacks
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.token_adapters import TokenAdapters
from sharding.axis import ModelAxis
from sharding.rules import MODEL, partition_spec

# So many columns of a matrix are looked at together: 57,344 rows of them take 56 MiB.
_COLUMNS = 256


def of_one_slot(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with room for one adapter."""
    layers = (
        replace(
            layer,
            lora=None if layer.lora is None else replace(layer.lora, num_slots=1),
            expert_lora=None if layer.expert_lora is None else ExpertLora(replace(layer.expert_lora.room, num_slots=1)),
        )
        for layer in spec.layers
    )
    outer = None if spec.lora is None else replace(spec.lora, room=replace(spec.lora.room, num_slots=1))
    return replace(spec, layers=tuple(layers), lora=outer)


def with_ratios(one: Any, layers: Any, spec: ModelSpec, axis: ModelAxis) -> Any:
    """Returns `one`, the arrays of an adapter for the layers, with ratios (magnitude / norm - 1) for its magnitudes.

    B is multiplied by magnitude / norm.

    `layers` are the arrays of the model's layers. Inside shard_map, all are one device's share, and so is `spec`, which
    has the layers of its stage. Where other stages have more layers of a kind, the last ones of a stack are empty.
    A magnitude of 0 says that the row has none, and so does a ratio of 0. A ratio that float32 cannot hold becomes 0.
    """
    stacks = {key: stack for key, stack in layer_stacks(spec).items() if stack.name.startswith(RATIO)}
    dtypes = {name.partition(".")[0]: array.dtype for name, array in _named(one) if name.startswith(DOWN)}
    of_columns = TokenAdapters.of(jnp.ones(_COLUMNS, jnp.int32), 1)
    rooms = {key: len(one[key]) if isinstance(one, dict) else len(stack.layers) for key, stack in stacks.items()}
    zeros = {key: jnp.zeros((rooms[key], *stack.decl.shape), jnp.float32) for key, stack in stacks.items()}

    def of_layer(
        found: dict[str, jax.Array], weights: Params, layer: Block, number: Scalar, window: Scalar, rope: Scalar
    ) -> dict[str, jax.Array]:
        if layer.lora is None:
            return found
        decls, matrices = layer.declare(), layer.matrices
        for name, _ in layer.lora.parts:
            key = next(key for key, own in stacks.items() if own.name == RATIO + name and own.decl == decls[own.name])
            adapted = layer.lora.adapted(weights, name, of_columns)
            squares = _squared_norms(adapted, matrices[name].shape, dtypes[DOWN + name])
            is_divided = MODEL in partition_spec(matrices[name].axes[-1:])
            norms = jnp.sqrt(axis.sum(squares) if is_divided else squares)
            magnitudes = matrices_at(weights[RATIO + name], jnp.zeros((), jnp.int32))
            # The sum of a row of zeros is 0, whatever multiplies it.
            ratios = magnitudes / jnp.where(norms > 0, norms, 1) - 1
            place = jnp.asarray(_places(stacks[key], spec.num_layers))[number]
            is_given = (magnitudes != 0) & jnp.isfinite(ratios)
            found = found | {key: found[key].at[place, 0].set(jnp.where(is_given, ratios, 0))}
        return found

    found = over_layers(of_layer, zeros, layers_with_lora({"layers": layers, LORA: {LAYERS: one}}), spec)

    def ratios_of(name: str, layer: int) -> jax.Array:
        """Returns the ratios f32[1, ..] of one matrix of a layer."""
        key, stack = next((key, own) for key, own in stacks.items() if own.name == RATIO + name and layer in own.layers)
        return found[key][stack.layers.index(layer)]

    one_by_one = any(layer.lora.one_by_one for layer in spec.whole.layers if layer.lora is not None)

    def multiplied(up: jax.Array, ratios: jax.Array) -> jax.Array:
        """Returns B [.., W] or, one by one, [1, R + 1, ..], times one and the ratios f32[1, ..]."""
        if one_by_one:  # the last row has the numbers of parts
            return jnp.concatenate([_times(up[:, :-1], 1 + ratios[:, None]), up[:, -1:]], axis=1)
        return _times(up, 1 + ratios[0][..., None])

    if isinstance(one, dict):
        ups = {key: stack for key, stack in layer_stacks(spec).items() if stack.name.startswith(UP) and stack.layers}
        for key, stack in ups.items():
            ratios = jnp.stack([ratios_of(stack.name.removeprefix(UP), layer) for layer in stack.layers])
            empty = len(jax.tree.leaves(one[key])[0]) - len(ratios)
            ratios = jnp.pad(ratios, [(0, empty), *((0, 0),) * (ratios.ndim - 1)])
            found[key] = jax.tree.map(partial(jax.vmap(multiplied), ratios=ratios), one[key])
        return one | found

    def with_own(number: int, mine: Params) -> Params:
        names = [name.removeprefix(UP) for name in mine if name.startswith(UP)]
        ratios = {name: ratios_of(name, number) for name in names}
        ups = {UP + name: jax.tree.map(partial(multiplied, ratios=ratios[name]), mine[UP + name]) for name in names}
        return mine | ups | {RATIO + name: own for name, own in ratios.items()}

    return [with_own(number, mine) for number, mine in enumerate(one)]


def _times(up: jax.Array, factors: jax.Array) -> jax.Array:
    # Tokens of other requests are multiplied by these numbers, too, and by zero: an infinite one would make them NaN.
    most = jnp.finfo(up.dtype).max.astype(jnp.float32)
    return jnp.clip(up.astype(jnp.float32) * factors, -most, most).astype(up.dtype)


def _places(stack: LayerStack, num_layers: int) -> np.ndarray:
    """Returns the place of each layer's array in its stack, i32[num_layers]."""
    places = np.zeros(num_layers, np.int32)
    places[list(stack.layers)] = np.arange(len(stack.layers))
    return places


def _named(one: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yields the arrays of an adapter with their names."""
    for layer in (one,) if isinstance(one, dict) else one:
        for name, node in layer.items():
            yield from ((name, array) for array in jax.tree.leaves(node))


def _squared_norms(adapted: Adapted, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns the sums of squares f32[..] of the rows of W + B A, [.., in] of that shape, that this device has.

    adapted: has the same adapter for all of `_COLUMNS` tokens, whose dtype is `dtype`
    """
    *rows, size = shape

    def of_form(form: Form, matrices: Sequence[Arrays], index: jax.Array | int) -> jax.Array:
        whole = None
        if not isinstance(form, FewBits):
            branches = [partial(form.plain, arrays) for arrays in matrices]
            whole = jax.lax.switch(index, branches) if len(branches) > 1 else branches[0]()
            whole = jnp.pad(whole, [(0, 0)] * len(rows) + [(0, -size % _COLUMNS)])

        def more(turn: jax.Array, sums: jax.Array) -> jax.Array:
            first = turn * _COLUMNS
            # Beyond the last column they are zeros.
            units = jax.nn.one_hot(first + jnp.arange(_COLUMNS), size, dtype=dtype)
            if whole is None:
                columns = form.product_with_one(units, matrices, index, jnp.float32)
            else:
                own = jax.lax.dynamic_slice_in_dim(whole, first, _COLUMNS, axis=-1)
                columns = jnp.moveaxis(own, -1, 0).astype(jnp.float32)
            return sums + jnp.sum(jnp.square(adapted.added(units, columns)), axis=0)

        return jax.lax.fori_loop(0, -(-size // _COLUMNS), more, jnp.zeros(rows, jnp.float32))

    return by_form(_one_of(adapted.matrix), of_form)


def _one_of(weight: Weight) -> OneOf:
    """Returns the matrix of a layer, of which a slice is taken where it is in a stack."""
    if isinstance(weight, OneOf):
        return weight
    if isinstance(weight, InStack):
        return OneOf((jax.tree.map(partial(item_of, index=weight.index), weight.stack),), 0)
    assert not isinstance(weight, Adapted), "a matrix is adapted once"
    return OneOf((weight.matrix if isinstance(weight, Slice) else weight,), 0)
