"""The declaration of an array of a model: its shape, how it is split and stored, and its initial values.

All code that treats arrays by their kind (to load, split, turn or count them) asks the declaration and knows no
names. So a new kind of layer only has to declare its arrays.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# matrix: a matmul contracts its last dimension, `[..., in]`; it is never copied, and may be turned round to
# `[in, out]`. experts: matrices along the first dimension, of which a token chooses some; they are never sliced.
# head_matrices: [K, G, .., ..], of which each query head multiplies its own; they keep their dtype and are not turned.
# table: rows are looked up by token. tied_table: a table that is the LM head too. vector: a norm or a bias, so small
# that a copy costs nothing. scales: of keys and values in pages; they are ones where a checkpoint has none.
# slots: where experts are that may move; no checkpoint has it.
Storage = Literal["matrix", "experts", "head_matrices", "table", "tied_table", "vector", "scales", "slots"]


@dataclass(frozen=True)
class HeadGroups:
    """The layout of a dimension that lists, for each KV head, its query heads and then the KV head's own elements."""

    group: int  # query heads of each KV head
    size: int  # elements of each query head
    own: int  # elements of the KV head itself


@dataclass(frozen=True)
class ParamDecl:
    """One array, with its shape and the logical axis of each dimension (a dimension with None is never split).

    `random` dummy values have variance 1 / last dimension, which is the fan-in of every `[out, in]` weight.
    An array whose heads are copied or filled up to divide over devices has `heads`, which describe the dimension after
    the axis `kv_heads`, or the dimension of the axis `heads`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["random", "ones", "zeros"] = "random"
    storage: Storage = "vector"
    dtype: str | None = None  # None is the dtype that the model is loaded in
    heads: HeadGroups | None = None
    chosen: tuple[int, int] | None = None  # of experts: how many of how many a token chooses
    per_element: int = 1  # weights in an element, where a byte has several
    is_trained: bool = True  # False: gradients are no way to change it, nor is the decay of weights

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def is_multiplied(self) -> bool:
        """Whether a matmul reads the whole array."""
        return self.storage in ("matrix", "experts", "head_matrices", "tied_table")

    def dtype_in(self, model_dtype: DTypeLike) -> np.dtype:
        """Returns the dtype of the array in a model that is loaded in `model_dtype`."""
        return jnp.dtype(model_dtype if self.dtype is None else self.dtype)

    def stacked(self, num_layers: int) -> "ParamDecl":
        """Returns the declaration of one array that stacks `num_layers` arrays like this one."""
        return replace(self, shape=(num_layers, *self.shape), axes=("layers", *self.axes))

    def of_replicas(self, count: int, axis: int) -> "ParamDecl":
        """Returns the declaration of an array of `count` like this one along `axis`, one for each replica of a mesh."""
        if count == 1:
            return self
        shape, axes = [*self.shape], [*self.axes]
        assert axes[axis] is None, "the array of a replica is whole along this axis"
        shape[axis], axes[axis] = count * shape[axis], "replicas"
        return replace(self, shape=tuple(shape), axes=tuple(axes))
