"""Reads the weights that replace those of a running engine, and checks all of them before any takes its place."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.lora import LORA
from jaxvllm.models.params import Params

# What stands in the tree beside the model's own weights, and stays.
_OTHERS = (DRAFT, LORA)


def new_weights(
    given: Mapping[str, Any] | Path,
    before: Sequence[Params],
    read: Callable[[Mapping[str, Any] | Path], list[Params]],
) -> list[Params]:
    """Returns the weights of every replica, with the drafts and the adapters of those `before`.

    `before` has one entry a replica.

    `given` are arrays by their names in a checkpoint or the directory of one, which `read` makes weights of, or a tree
    as the engine holds it.
    Arrays of such a tree that are in place already are used as they are.
    Raises ValueError for a tensor or an array that is missing, unexpected, or of another shape or dtype.
    """
    others = [{name: params[name] for name in _OTHERS if name in params} for params in before]
    if isinstance(given, Path) or not _is_tree(given):
        return [params | other for params, other in zip(read(given), others, strict=True)]
    own = _without_others(given)
    return [_placed(own, _without_others(params)) | other for params, other in zip(before, others, strict=True)]


def _without_others(params: Mapping[str, Any]) -> Params:
    return {name: value for name, value in params.items() if name not in _OTHERS}


def _is_tree(given: Mapping[str, Any]) -> bool:
    """Returns whether the weights are a tree. A checkpoint's tensors are arrays, and none is called `layers`."""
    return isinstance(given.get("layers"), dict | list)


def _placed(given: Params, like: Params) -> Params:
    """Returns the arrays of `given` where those of `like` are."""
    structure: Any = jax.tree.structure(like)
    if jax.tree.structure(given) != structure:
        raise ValueError("the given tree of weights has other arrays than the engine's: give one like llm.weights")
    placed = []
    for array, (path, old) in zip(jax.tree.leaves(given), jax.tree.leaves_with_path(like), strict=True):
        if array.shape != old.shape or array.dtype != old.dtype:
            raise ValueError(
                f"the given weight {jax.tree_util.keystr(path)} is {array.dtype}{list(array.shape)}, and the engine's "
                f"is {old.dtype}{list(old.shape)}"
            )
        placed.append(jax.device_put(array, old.sharding))
    tree: Params = jax.tree.unflatten(structure, placed)
    return tree
