"""`PlainExpertsFfn`: experts of two matrices and no gate, perhaps in a space narrower than the hidden state."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.ops import activate, project, project_grouped
from jaxvllm.models.token_adapters import RowAdapters

_BESIDE = "shared_"  # before the names of the arrays of the FFN beside the experts


@dataclass(frozen=True)
class PlainExpertsFfn(ExpertsFfn):
    """Experts that return down(activation(up x)), and beside them a plain FFN through which every token goes.

    With a latent size, one matrix makes x narrower for all experts, and another one brings their sum back.
    """

    beside: PlainFfn | None = None
    latent_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.shared is None, "the FFN beside these experts has no gate, either"

    @property
    def has_shared(self) -> bool:
        return self.beside is not None

    @property
    def _width(self) -> int:
        """The size of what experts read and return."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def up(self) -> Linear:
        """The projections of all experts to their inner features."""
        experts, ffn = self._axes
        return self._of_experts((self.size, self._width), (experts, ffn, "embed"))

    @property
    def down(self) -> Linear:
        experts, ffn = self._axes
        return self._of_experts((self._width, self.size), (experts, "embed", ffn))

    @property
    def narrow(self) -> Linear:
        return Linear((self._width, self.hidden_size), (None, "embed"))

    @property
    def widen(self) -> Linear:
        return Linear((self.hidden_size, self._width), ("embed", None))

    def declare(self) -> dict[str, ParamDecl]:
        decls = self.router.declare() | self.up.declare("experts_up") | self.down.declare("experts_down")
        if self.latent_size is not None:
            decls |= self.narrow.declare("experts_narrow") | self.widen.declare("experts_widen")
        if self.beside is not None:
            decls |= {_BESIDE + name: decl for name, decl in self.beside.declare().items()}
        return decls | self._declare_slots()

    def problem(self, size: int) -> str | None:
        return super().problem(size) or (None if self.beside is None else self.beside.problem(size))

    def shard(self, size: int) -> Self:
        return replace(super().shard(size), beside=None if self.beside is None else self.beside.shard(size))

    def apply_choosing(
        self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput
    ) -> tuple[jax.Array, jax.Array]:
        beside, together = self._axes_of_sums(given.axis)
        chosen, counts = self.router.choose(weights, x, given.backend)
        narrow = x if self.latent_size is None else self.narrow.apply(weights, "experts_narrow", x)
        out = self._chosen(weights, narrow, chosen, counts, given)
        if self.latent_size is not None:
            out = self.widen.apply(weights, "experts_widen", out)  # mostly of this device's part: the sum comes last
        if self.beside is not None:
            of_beside = {name: weights[_BESIDE + name] for name in self.beside.declare()}
            h = activate(self.beside.up.apply(of_beside, "up", x), self.beside.activation)
            out = out + beside.sum(project(h, of_beside["down"]))
        return together.sum(out), chosen

    def _inner(
        self, weights: Mapping[str, Any], rows: jax.Array, starts: jax.Array, adapters: RowAdapters | None
    ) -> jax.Array:
        assert isinstance(self.activation, str), "without a gate, only an activation can be applied"
        return activate(project_grouped(rows, weights["experts_up"], starts, adapters), self.activation)
