"""`Laurel`: a residual beside attention that a layer has learned, of low rank (arXiv 2411.07501)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import Norm
from jaxvllm.models.positive import require_positive


@dataclass(frozen=True)
class Laurel:
    """Returns x + norm(B A x), where A has `rank` rows. Every device has all of it."""

    hidden_size: int
    rank: int
    norm: Norm

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size rank")

    @property
    def left(self) -> Linear:
        return Linear((self.rank, self.hidden_size), (None, "embed"))

    @property
    def right(self) -> Linear:
        return Linear((self.hidden_size, self.rank), ("embed", None))

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name."""
        decls = self.left.declare("laurel_left") | self.right.declare("laurel_right")
        return decls | self.norm.declare("laurel_norm", (self.hidden_size,), ("embed",))

    def apply(self, weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """Returns [T, E] for what attention reads, x [T, E]."""
        low = self.right.apply(weights, "laurel_right", self.left.apply(weights, "laurel_left", x))
        return x + self.norm.apply(weights, "laurel_norm", low)
