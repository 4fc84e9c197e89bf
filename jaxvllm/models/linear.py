"""`Linear`: a matrix and perhaps a bias, with their sizes and the axes along which devices share them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxvllm.models.declaration import HeadGroups, ParamDecl, Storage
from jaxvllm.models.forms.form import Gating
from jaxvllm.models.norm import bias_of
from jaxvllm.models.ops import biased, project, project_gated
from sharding.axis import ModelAxis


@dataclass(frozen=True)
class Linear:
    """Multiplies x [T, in] by a matrix [.., in], whose dimensions have logical axes, and adds a bias [..].

    The form in which the matrix is kept is chosen when the model is loaded, and no `Linear` knows it.
    """

    shape: tuple[int, ...]  # of the matrix
    axes: tuple[str | None, ...]
    bias: bool = False
    heads: HeadGroups | None = None  # of the dimension that is split by heads
    dtype: str | None = None  # None is the dtype that the model is loaded in
    # Where the first dimension is one of experts: how many of how many a token chooses.
    chosen: tuple[int, int] | None = None

    def declare(self, name: str) -> dict[str, ParamDecl]:
        """Returns its arrays for a matrix of that name."""
        storage: Storage = "matrix" if self.chosen is None else "experts"
        options: dict[str, Any] = {"dtype": self.dtype, "chosen": self.chosen}
        matrix = {name: ParamDecl(self.shape, self.axes, storage=storage, heads=self.heads, **options)}
        if not self.bias:
            return matrix
        heads = None if self.axes[-1] == "heads" else self.heads
        return matrix | {
            bias_of(name): ParamDecl(self.shape[:-1], self.axes[:-1], "zeros", heads=heads, dtype=self.dtype)
        }

    def apply(self, weights: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
        """Returns [T, ..] with the arrays that it has declared under that name."""
        return project(x, weights[name], weights.get(bias_of(name)))

    def apply_summed(self, weights: Mapping[str, Any], name: str, x: jax.Array, axis: ModelAxis) -> jax.Array:
        """Does the same where each device of `axis` has a part of x and of the columns of the matrix."""
        return biased(axis.sum(project(x, weights[name])), weights.get(bias_of(name)))

    def apply_gated(self, weights: Mapping[str, Any], name: str, x: jax.Array, gating: Gating) -> jax.Array:
        """Returns b x gated by a x, [T, F], for a matrix [2, F, in] of the halves a and b."""
        return project_gated(x, weights[name], gating, weights.get(bias_of(name)))
