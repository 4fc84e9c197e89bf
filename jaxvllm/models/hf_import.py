"""Makes an engine's arrays of tensors that are on its devices already: the inverse of `HfExport`, in a traced function.

A checkpoint in files or on the host is read by `jaxvllm.models.checkpoint`, which needs no second copy on a device.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.models.forms import Matrix
from jaxvllm.models.hf_export import HfExport
from jaxvllm.models.params import Params, declaration, layer_stacks
from jaxvllm.models.tiling import Box, spread_boxes


def without_numbers(params: Params) -> Params:
    """Returns the shapes, dtypes and shardings of parameters."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), params)


def params_of(tensors: Mapping[str, jax.Array], export: HfExport, like: Params) -> Params:
    """Returns parameters like `like`, each in its form and dtype, of tensors by their names in a checkpoint.

    like: arrays, or jax.ShapeDtypeStruct, of a model that is spread as `export.spread` says, without stages

    Arrays that no checkpoint has, such as scales of keys and values, are not among them. Raises ValueError for a form
    that rounds, because the host makes those.
    """
    spread = export.spread
    assert spread.stages == 1, "each stage has layers of its own, and room for others"

    def of(name: str, layer: int | None, node: Any) -> Any:
        return _node(_array(tensors, export, name, layer), node)

    def has(name: str, layer: int | None) -> bool:
        return bool(export.sources(name, layer))

    params: Params = {name: of(name, None, node) for name, node in like.items() if name != "layers" and has(name, None)}
    layers = like["layers"]
    if isinstance(layers, list):
        numbered = enumerate(layers)
        params["layers"] = [
            {name: of(name, layer, node) for name, node in own.items() if has(name, layer)} for layer, own in numbered
        ]
        return params
    stacks = {key: stack for key, stack in layer_stacks(spread.whole).items() if has(stack.name, stack.layers[0])}
    params["layers"] = {}
    for key, stack in stacks.items():
        one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), layers[key])
        nodes = [of(stack.name, layer, one) for layer in stack.layers]
        params["layers"][key] = jax.tree.map(lambda *arrays: jnp.stack(arrays), *nodes)
    return params


def _array(tensors: Mapping[str, jax.Array], export: HfExport, name: str, layer: int | None) -> jax.Array:
    """Returns an array as a mesh has it: with copies of KV heads, and zeros where sizes are filled up."""
    spread, sources = export.spread, export.sources(name, layer)
    decl, whole = (declaration(spec, name, layer) for spec in (spread.spec, spread.whole))
    zeros = (0,) * len(decl.shape)
    stored = jnp.zeros(decl.shape, tensors[sources[0].name].dtype)
    for source in sources:
        part = source.rows_of(tensors[source.name]).reshape(source.view)
        stored = stored.at[Box(source.at, source.view).index(zeros)].set(part)
    if decl.shape == whole.shape:
        return stored
    array = jnp.zeros(whole.shape, stored.dtype)
    for box, origin in spread_boxes(decl, whole):
        array = array.at[box.index(zeros)].set(stored[Box(origin, box.shape).index(zeros)])
    return array


def _node(array: jax.Array, like: Any) -> Any:
    """Returns an array in the dtype and, if it is a matrix, in the form of `like`."""
    array = array.astype(jax.tree.leaves(like)[0].dtype)
    if not isinstance(like, Matrix):
        return array
    shapes = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in like.arrays.items()}
    # `plain` chooses each number of the matrix from these arrays. Its transpose puts the number there, beside zeros.
    [arrays] = jax.linear_transpose(like.form.plain, shapes)(array)
    return Matrix(like.form, arrays)
