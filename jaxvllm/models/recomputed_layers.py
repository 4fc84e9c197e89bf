"""Runs all layers so that the program has derivatives: what a layer computes is not kept but computed again for them.

The loops of `layer_loops` have none, because nobody knows before how often a while loop runs.
"""

from collections.abc import Collection
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.block import Block
from jaxvllm.models.layer_input import Scalar
from jaxvllm.models.layer_loops import LayerStep, Loop, layer_loops, shared_numbers
from jaxvllm.models.ops import Slice
from jaxvllm.models.params import LayerStack, Params, declare_layer, layer_stacks
from jaxvllm.models.spec import ModelSpec


def over_recomputed_layers[Carry](
    step: LayerStep[Carry], carry: Carry, layers: list[Params] | Params, spec: ModelSpec
) -> Carry:
    """Applies `step` to `carry` for every layer, as `over_layers` does, and keeps only what goes from layer to layer.

    Layers with arrays of their own are compiled one by one: a loop would add up derivatives for all of them in each
    turn. Stacks are scanned.
    """
    if isinstance(layers, list):
        for number, weights in enumerate(layers):
            about = shared_numbers(spec, (number,))
            carry = _recomputed(step, spec.layers[number], about)(carry, weights, number, {})
        return carry
    for loop in layer_loops(spec.layers, spec.whole.layers):
        carry = _scanned(step, carry, layers, spec, loop)
    return carry


def _recomputed[Carry](
    step: LayerStep[Carry], layer: Block, about: dict[str, Any], slices: Collection[str] = ()
) -> Any:
    """Returns the function of (carry, weights, number, what differs between turns) that computes one layer.

    slices: the names of the weights that are slices of stacks of matrices
    """

    def one(carry: Carry, weights: Params, number: Scalar, varying: dict[str, Any]) -> Carry:
        own = about | varying
        weights = {name: Slice(node) if name in slices else node for name, node in weights.items()}
        return _rounded(step(_rounded(carry), weights, layer, number, own["window"], own["rope"]))

    return jax.checkpoint(one)


def _rounded[Carry](carry: Carry) -> Carry:
    """Returns what goes from layer to layer in its own dtype, as the loops of an engine hand it on.

    Without a barrier XLA would compute on with what it was in float32: in bfloat16 that was 0.2 in a log-probability of
    the demo model. Each array has one of its own, since XLA:CPU of jax 0.11.2 ends the process by a fault where one for
    all of them, empty ones too, stands in a program of several devices.
    """
    return jax.tree.map(lambda x: jax.lax.optimization_barrier(x) if x.size else x, carry)


def _scanned[Carry](step: LayerStep[Carry], carry: Carry, layers: Params, spec: ModelSpec, loop: Loop) -> Carry:
    """Applies `step` to the layers of one loop, of which each turn reads slices of stacks."""
    stacks = {key: stack for key, stack in layer_stacks(spec).items() if _places(stack, loop)}
    held = {key: jax.tree.map(partial(_by_turn, stack=stack, loop=loop), layers[key]) for key, stack in stacks.items()}
    numbers = [number for run in range(len(loop.runs)) for number in loop.layers_of(run).T]  # of each turn
    abouts = [shared_numbers(spec, of_turns) for of_turns in numbers]
    varying = [{name: value for name, value in about.items() if not isinstance(value, int)} for about in abouts]

    def turn(carry: Carry, given: tuple[jax.Array, Params, list[dict[str, Any]]]) -> tuple[Carry, None]:
        first, slices, of_turn = given
        for place, (of_turns, about, own) in enumerate(zip(numbers, abouts, of_turn, strict=True)):
            weights = {}
            for key, stack in stacks.items():
                if loop.first + place in stack.layers:
                    at = _places(stack, loop, loop.first + place)
                    weights[stack.name] = jax.tree.map(itemgetter(at), slices[key])
            decls = declare_layer(spec, of_turns[0])
            matrices = [name for name in weights if decls[name].storage == "matrix"]
            layer = _recomputed(step, spec.layers[of_turns[0]], about, matrices)
            carry = layer(carry, weights, first + place, own)
        return carry, None

    firsts = loop.first + jnp.arange(loop.count, dtype=jnp.int32) * loop.period
    return jax.lax.scan(turn, carry, (firsts, held, varying), length=loop.count)[0]


def _places(stack: LayerStack, loop: Loop, end: int | None = None) -> int:
    """Returns how many layers of a loop, before layer `end` if there is one, have an array in the stack."""
    end = loop.first + loop.count * loop.period if end is None else end
    return sum(loop.first <= layer < end for layer in stack.layers)


def _by_turn(array: jax.Array, stack: LayerStack, loop: Loop) -> jax.Array:
    """Returns the layers of a loop in a stack, [turns, layers of a turn, ..]."""
    first, count = sum(layer < loop.first for layer in stack.layers), _places(stack, loop)
    return array[first : first + count].reshape(loop.count, -1, *array.shape[1:])
