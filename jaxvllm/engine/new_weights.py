"""Reads the weights that replace those of a running engine, and checks all of them before any takes its place."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxvllm.models.forms import Matrix
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.lora import LORA, without_adapters
from jaxvllm.models.params import Params
from jaxvllm.runtime.parked_params import ParkedArray

# The field in which `EngineModule` has its weights, and so the one name at the root of its state.
FIELD_OF_MODULE = "weights"


@runtime_checkable
class HoldsWeights(Protocol):
    """Something that holds weights as an engine does, such as a module of a trainer."""

    def tree(self) -> Mapping[str, Any]:
        """Returns a tree like `LLM.weights`, of the arrays as they are now."""


type WeightSource = Mapping[str, Any] | HoldsWeights | Path


def new_weights(
    source: WeightSource,
    before: Sequence[Params],
    read: Callable[[Mapping[str, Any] | Path, Sequence[Params] | None], list[Params]],
    is_part: bool = False,
) -> list[Params]:
    """Returns the weights of every replica, where those `before` have one entry a replica.

    `source` are arrays by their names in a checkpoint or the directory of one, which `read` makes weights of, or a tree
    as the engine holds it, or as flax's state of `EngineModule` has it. Arrays of such a tree that are in place already
    are used as they are. If it `is_part` of the weights, what is not given stays. Adapters always do, and drafts but
    those that a tree has.
    Raises ValueError for a tensor or an array that is missing, unexpected, or of another shape or dtype.
    """
    given = source.tree() if isinstance(source, HoldsWeights) else source
    if not isinstance(given, Mapping | Path):
        raise ValueError(
            "weights must be a tree like llm.weights, something whose tree() is one, arrays by their names in a "
            f"checkpoint, or the directory of a checkpoint, not {type(given).__name__}"
        )
    if isinstance(given, Mapping) and given.keys() == {FIELD_OF_MODULE}:
        given = given[FIELD_OF_MODULE]
    if isinstance(given, Path) and is_part:
        raise ValueError("partial is for arrays, and a directory has all weights: give the tensors of its files")
    if not isinstance(given, Path) and _is_tree(given):
        trees = [without_adapters(params) for params in before]
        made = [jax.tree.map(_placed, checked_tree(given, tree, is_part), tree) for tree in trees]
    else:
        made = read(given, [_without(params, DRAFT, LORA) for params in before] if is_part else None)
    return [old | params for old, params in zip(before, made, strict=True)]


def _without(params: Params, *names: str) -> Params:
    return {name: value for name, value in params.items() if name not in names}


def _is_tree(given: Mapping[str, Any]) -> bool:
    """Returns whether the weights are a tree, and no tensors of a checkpoint, all of whose names have dots."""
    return not any(isinstance(name, str) and "." in name for name in given)


def checked_tree(given: Any, like: Any, is_part: bool = False, place: str = "", like_what: str = "llm.weights") -> Any:
    """Returns a tree like `like` of the given arrays, and of those of `like` that are not given and need not be.

    Raises ValueError for arrays that are missing, unexpected, or of another shape or dtype. It tells the user to give
    a tree like `like_what`.

    A list may be given as a mapping from its indices, and a matrix in a form as one from the names of its arrays. What
    stands for an array, as variables of flax do, says so with a `get_value`.
    """
    if isinstance(like, dict | list):
        items = dict(like.items() if isinstance(like, dict) else enumerate(like))
        found = dict(enumerate(given)) if isinstance(given, list | tuple) else given
        needed = () if is_part else [name for name in items if name != DRAFT]
        if (problem := _other_names(found, needed, items)) is not None:
            raise ValueError(
                f"the given tree of weights has other arrays than the engine's, {place or 'at its root'} {problem}: "
                f"give one like {like_what}"
            )
        checked = {
            name: checked_tree(found[name], old, is_part, f"{place}[{name!r}]", like_what) if name in found else old
            for name, old in items.items()
        }
        return checked if isinstance(like, dict) else [*checked.values()]
    if isinstance(like, jax.Array | ParkedArray | np.ndarray):
        array = given.get_value() if hasattr(given, "get_value") else given
        if (getattr(array, "shape", None), getattr(array, "dtype", None)) != (like.shape, like.dtype):
            kind = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
            raise ValueError(f"the given weight {place} is {kind}, and the engine's is {like.dtype}{list(like.shape)}")
        return array
    assert isinstance(like, Matrix), "parameters are dicts and lists of arrays and matrices"
    arrays = given.arrays if isinstance(given, Matrix) and given.form == like.form else given
    if not isinstance(arrays, Mapping):
        raise ValueError(
            f"the given weight {place} is not kept as the engine's is: give it in the form that {like_what} has, or "
            "give all weights by their names in a checkpoint, of which the engine makes its own forms"
        )
    return Matrix(like.form, checked_tree(arrays, like.arrays, False, place, like_what))


def _other_names(found: Any, needed: Iterable[Any], known: Container[Any]) -> str | None:
    """Returns what is wrong with a node of a given tree that must have the `needed` names, and none but `known`."""
    if not isinstance(found, Mapping):
        return f"is {type(found).__name__}"
    missing, unknown = [one for one in needed if one not in found], [one for one in found if one not in known]
    if missing or unknown:
        return f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}"
    return None


def _placed(array: Any, old: jax.Array | ParkedArray) -> Any:
    """Returns an array where `old` is, or would be if it did not sleep: itself, if it is there already."""
    if array is old or (isinstance(array, jax.Array) and array.sharding == old.sharding):
        return array
    # On CPUs jax may use the memory of an array of NumPy's as its own, and a trainer may write to that again.
    return jax.device_put(array.copy() if isinstance(array, np.ndarray) else array, old.sharding)
