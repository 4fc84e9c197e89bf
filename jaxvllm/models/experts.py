"""`ExpertsFfn`: a feed-forward network of many parts, the experts, of which each token goes through a few.

Rows are sorted by the expert that they go to, and multiplied by group (`pallas_kernels.grouped_matmul`). So the
matrices of experts that nobody has chosen are not read, and no array has a dimension of tokens and one of experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.expert_exchange import (
    NOWHERE,
    AllToAllExchange,
    Choices,
    ExchangeChoice,
    ExpertExchange,
    GatherExchange,
)
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.ffn import ChoosingFfn, Ffn, GatedFfn
from jaxvllm.models.forms.form import Gating
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import bias_of
from jaxvllm.models.ops import project, project_grouped, project_grouped_gated
from jaxvllm.models.positive import require_positive
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.token_adapters import RowAdapters
from pallas_kernels.grouped_matmul import order_rows
from sharding.axis import ALONE, ModelAxis, ReplicaAxis
from sharding.whole_mesh import WholeMesh

_SHARED = "shared_"  # before the names of the arrays of the shared expert
# The array that says where experts are, i32[experts, most copies]: their slots, and -1 after the last copy.
SLOTS = "experts_slots"


@dataclass(frozen=True)
class ExpertsFfn(ChoosingFfn):
    """Gated experts of one size (arXiv 2101.03961), and perhaps one beside them through which every token goes.

    A device has a part of each expert or, with `is_by_expert`, some experts whole: then it computes the rows that have
    chosen one of these. Either way its output is its part of a sum, to which all devices contribute once.

    With `num_replicas`, so many replicas share the experts: each device of all of them has some. An `ExpertExchange`
    brings tokens to devices that have their experts, and what these return of a replica's own tokens comes back.

    With `num_redundant`, experts are in slots, of which there are so many more than experts. The array `SLOTS` says
    which slots have copies of an expert, and may change from step to step. No bit of the output depends on it.
    """

    hidden_size: int
    size: int  # of the inner features of an expert
    router: ExpertRouter
    activation: Gating = "silu"
    shared: GatedFfn | None = None
    is_shared_gated: bool = False  # the sigmoid of a number of each token multiplies what the shared expert returns
    bias: bool = False  # of the experts' matrices
    output_scale: float = 1.0  # multiplies the sum of all experts, the shared one included
    weighs_input: bool = False  # what an expert counts multiplies its input, and not its output (Llama 4)
    num_identities: int = 0  # the last experts of the router, which return their input (LongCat-Flash)
    is_by_expert: bool = False
    num_redundant: int | None = None  # slots beyond one for each expert; None: an expert stays where it was loaded
    num_replicas: int = 1  # of the rest of the model, that share the experts
    sends_apart: bool = False  # replicas that share experts send each token only to devices that have some of its own
    num_shards: int = 1  # devices that have a part of it
    most_copies: int | None = None  # of an expert in slots; None: the arrays are those of a checkpoint, without slots

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size size num_shards")
        assert not self.bias or (self.output_scale == 1 and not self.weighs_input), "no model has both"
        assert self.num_redundant is None or self.is_by_expert, "only whole experts have slots"
        assert self.num_replicas == 1 or self.is_by_expert, "only whole experts are shared by replicas"
        assert self.num_replicas > 1 or not self.sends_apart, "a replica alone has all tokens on every device"

    @property
    def has_shared(self) -> bool:
        """Whether there is an FFN beside the experts, through which every token goes."""
        return self.shared is not None

    @property
    def has_slots(self) -> bool:
        """Whether experts are in slots."""
        return self.most_copies is not None

    @property
    def num_slots(self) -> int:
        """The slots of all devices, or the experts where there are none."""
        return self._num_real + ((self.num_redundant or 0) if self.has_slots else 0)

    @property
    def num_held(self) -> int:
        """The experts of which a device has matrices."""
        return self.num_slots // (self.num_shards if self.is_by_expert else 1)

    @property
    def _num_real(self) -> int:
        """The experts that have matrices."""
        return self.router.num_experts - self.num_identities

    @property
    def _replicas(self) -> ReplicaAxis:
        """The replicas that share the experts."""
        return ReplicaAxis(self.num_replicas)

    @property
    def _axes(self) -> tuple[str | None, str | None]:
        """The axes of experts and of their inner features."""
        return ("experts", None) if self.is_by_expert else (None, "ffn")

    @property
    def gate_up(self) -> Linear:
        """The projections of all experts to the gate and to the features that it multiplies."""
        experts, ffn = self._axes
        return self._of_experts((2, self.size, self.hidden_size), (experts, None, ffn, "embed"), self.bias)

    @property
    def down(self) -> Linear:
        """The projections of all experts back to the hidden size, without the biases, which no device has a part of."""
        experts, ffn = self._axes
        return self._of_experts((self.hidden_size, self.size), (experts, "embed", ffn))

    def _of_experts(self, shape: tuple[int, ...], axes: tuple[str | None, ...], bias: bool = False) -> Linear:
        # Tokens take the copies of an expert in turn.
        chosen = self.router.top_k, self.router.num_experts + self.num_slots - self._num_real
        return Linear((self.num_held, *shape), axes, bias, chosen=chosen)

    @property
    def shared_gate(self) -> Linear:
        return Linear((1, self.hidden_size), (None, "embed"))

    def declare(self) -> dict[str, ParamDecl]:
        decls = self.router.declare() | self.gate_up.declare("experts_gate_up") | self.down.declare("experts_down")
        if self.bias:
            shape = (self.router.num_experts, self.hidden_size)
            decls[bias_of("experts_down")] = ParamDecl(shape, (None, "embed"), "zeros")
        if self.shared is not None:
            decls |= {_SHARED + name: decl for name, decl in self.shared.declare().items()}
            decls |= self.shared_gate.declare("shared_gate") if self.is_shared_gated else {}
        return decls | self._declare_slots()

    def _declare_slots(self) -> dict[str, ParamDecl]:
        if self.most_copies is None:
            return {}
        shape = (self.router.num_experts, self.most_copies)
        return {SLOTS: ParamDecl(shape, (None, None), storage="slots", dtype="int32")}

    def problem(self, size: int) -> str | None:
        count, inner = self._num_real, self.size
        holders = self.num_replicas * size
        if self.is_by_expert and (count + (self.num_redundant or 0)) % holders:
            more = f" and {self.num_redundant} redundant ones" if self.num_redundant else ""
            return f"{count} experts{more} do not divide over {holders} devices"
        if not self.is_by_expert and inner % size:
            return f"experts of size {inner} do not divide over {size} devices"
        return None if self.shared is None else self.shared.problem(size)

    def spread(self, size: int) -> Self:
        if self.num_redundant is None:
            return self
        # A second copy on the same device would share nothing out.
        return replace(self, most_copies=min(1 + self.num_redundant, self.num_replicas * size))

    def shard(self, size: int) -> Self:
        shared = None if self.shared is None else self.shared.shard(size)
        inner = self.size if self.is_by_expert else self.size // size
        return replace(self, size=inner, shared=shared, num_shards=self.num_replicas * size)

    def whole(self) -> Self:
        """Returns the network of which every device has all experts, and sends nothing."""
        return replace(self, is_by_expert=False, num_redundant=None, num_replicas=1, sends_apart=False)

    def apply_choosing(
        self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput
    ) -> tuple[jax.Array, jax.Array]:
        chosen, counts = self.router.choose(weights, x, given.backend)
        beside, together = self._axes_of_sums(given.axis)
        out = self._chosen(weights, x, chosen, counts, given)
        if self.shared is not None:
            out = out + beside.sum(self._shared(weights, x, self.shared))
        if self.output_scale != 1:
            out = out * jnp.asarray(self.output_scale, out.dtype)
        out = together.sum(out)
        if self.num_identities:
            kept = jnp.where(chosen >= self._num_real, counts, 0).sum(-1, keepdims=True)
            out = out + (x.astype(jnp.float32) * kept).astype(out.dtype)
        if not self.bias:
            return out, chosen
        # Every device has all of these, and adds them once, after the sum.
        biases = weights[bias_of("experts_down")][chosen].astype(jnp.float32) * counts[..., None]
        return out + biases.sum(1).astype(out.dtype), chosen

    def _axes_of_sums(self, axis: ModelAxis) -> tuple[ModelAxis, ModelAxis]:
        """Returns the axis over which what stands beside the experts is summed alone, and that of the sum of all.

        Experts in slots, and those to which each token is sent apart, are summed over all devices already.
        """
        return (axis, ALONE) if self.has_slots or self.sends_apart else (ALONE, axis)

    def _chosen(
        self, weights: Mapping[str, Any], x: jax.Array, chosen: jax.Array, counts: jax.Array, given: LayerInput
    ) -> jax.Array:
        """Returns this device's part of what the chosen experts return for x [T, E], without the shared one.

        Where experts are in slots, or each token is sent apart, it is all of it. Where replicas gather tokens, it is
        the part of the devices that have this one's place in their replicas.
        """
        exchange = self._exchange(given.axis)
        own_slots = None if given.adapters is None else given.adapters.among(self._replicas)
        choices = exchange.of_all(Choices(chosen, counts, given.is_needed, own_slots))
        num_tokens, each = choices.experts.shape
        held = _slots_of(weights[SLOTS], choices.experts) if self.has_slots else choices.experts
        if choices.is_needed is not None:  # others choose no expert, whose matrices would be read for nothing
            held = jnp.where(choices.is_needed[:, None], held, NOWHERE)
        own = held - self._first_held(given.axis) if self.is_by_expert else held
        is_here = (own >= 0) & (own < self.num_held)
        # Rows of experts that are elsewhere come last, and are not computed. A token has no expert twice.
        expert = jnp.where(is_here, own, self.num_held).reshape(-1)
        order = order_rows(expert, self.num_held, given.backend)
        own_rows, starts = order.rows[: num_tokens * min(each, self.num_held)], order.starts
        tokens = own_rows // each
        adapters: RowAdapters | None = None
        if given.adapters is not None and choices.adapters is not None:
            num_slots, slots = given.adapters.num_slots * self.num_replicas, choices.adapters[tokens]
            adapters = RowAdapters.of(slots, expert[own_rows], num_slots, self.num_held, given.backend)
        rows = exchange.states(x, held, tokens)
        if self.weighs_input:
            rows = rows * choices.counts.reshape(-1)[own_rows][:, None].astype(x.dtype)
        h = self._inner(weights, rows, starts, adapters)
        y = project_grouped(h, weights["experts_down"], starts, adapters)
        factors = jnp.ones_like(choices.counts) if self.weighs_input else choices.counts
        return exchange.sums(y, order.places, held, factors)[: len(x)]

    def _exchange(self, axis: ModelAxis) -> ExpertExchange:
        """Returns the way of tokens to experts and back."""
        if self.sends_apart:
            return AllToAllExchange(WholeMesh(self._replicas, axis), self.num_held)
        first = self._first_held(axis) if self.is_by_expert else 0
        return GatherExchange(self._replicas, axis, first, self.num_held, self.has_slots)

    def _first_held(self, axis: ModelAxis) -> jax.Array | int:
        """Returns the first expert, or slot, of which this device has matrices."""
        return self._replicas.first(axis.size * self.num_held) + axis.first(self.num_held)

    def _inner(
        self, weights: Mapping[str, Any], rows: jax.Array, starts: jax.Array, adapters: RowAdapters | None
    ) -> jax.Array:
        """Returns the inner features of rows that are sorted by expert, and have these adapters, if any has one."""
        bias = None
        if self.bias:  # rows of no expert may have any
            expert = jnp.searchsorted(starts, jnp.arange(len(rows)), side="right") - 1
            bias = jnp.take(weights[bias_of("experts_gate_up")], expert, axis=0, mode="clip")
        return project_grouped_gated(rows, weights["experts_gate_up"], starts, self.activation, bias, adapters)

    def _shared(self, weights: Mapping[str, Any], x: jax.Array, shared: GatedFfn) -> jax.Array:
        """Returns this device's part of what the shared expert returns."""
        of_shared = {name: weights[_SHARED + name] for name in shared.declare()}
        h = shared.gate_up.apply_gated(of_shared, "gate_up", x, shared.activation)
        out = project(h, of_shared["down"])
        if not self.is_shared_gated:
            return out
        return out * jax.nn.sigmoid(self.shared_gate.apply(weights, "shared_gate", x))


def first_slots(num_experts: int, most_copies: int) -> np.ndarray:
    """Returns the array `SLOTS` of experts that were just loaded: each has one copy, one after the other."""
    slots = np.full((num_experts, most_copies), -1, np.int32)
    slots[:, 0] = np.arange(num_experts)
    return slots


def _slots_of(slots: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns the slots i32[T, k] in which tokens find the experts `chosen` i32[T, k]; for `slots` see `SLOTS`.

    Tokens take the copies of an expert in turn, by their places in the step.
    """
    num_copies = (slots >= 0).sum(-1, dtype=jnp.int32)
    turns = jnp.arange(len(chosen), dtype=jnp.int32)[:, None]
    return slots[chosen, turns % num_copies[chosen]]


def num_experts(spec: ModelSpec) -> dict[int, int]:
    """Returns how many experts each layer with experts has, by the number of the layer."""
    ffns = {number: layer.ffn for number, layer in enumerate(spec.layers)}
    return {number: ffn.router.num_experts for number, ffn in ffns.items() if isinstance(ffn, ExpertsFfn)}


def replicas_of(spec: ModelSpec) -> int:
    """Returns how many replicas share the experts of the model: 1 where each has its own, or none."""
    ffns = (ffn for layer in spec.layers for ffn in (layer.ffn, layer.late))
    return max((ffn.num_replicas for ffn in ffns if isinstance(ffn, ExpertsFfn)), default=1)


def by_expert(
    spec: ModelSpec,
    num_redundant: int | None = None,
    num_replicas: int = 1,
    exchange: ExchangeChoice | None = None,
) -> ModelSpec:
    """Returns the spec whose devices have some experts whole, instead of a part of each.

    With `num_redundant` they are in slots, so many more than there are experts, and may move. With `num_replicas` so
    many replicas share them, and `exchange` chooses how tokens come to them; None: all devices gather them.
    Raises ValueError for a model without experts.
    """
    ffns = [ffn for layer in spec.layers for ffn in (layer.ffn, layer.late) if isinstance(ffn, ExpertsFfn)]
    if not ffns:
        raise ValueError("enable_expert_parallel needs a model with experts, and this one has none: leave it out")
    if num_redundant is not None and any(ffn.num_identities for ffn in ffns):
        raise ValueError("enable_eplb moves matrices, and some experts of this model have none: leave it out")

    def of[Kind: Ffn | None](ffn: Kind) -> Kind:
        if not isinstance(ffn, ExpertsFfn):
            return ffn
        apart = exchange is not None and exchange.sends_apart(num_replicas, ffn.router.top_k, ffn.has_shared)
        return replace(
            ffn, is_by_expert=True, num_redundant=num_redundant, num_replicas=num_replicas, sends_apart=apart
        )

    return replace(spec, layers=tuple(replace(layer, ffn=of(layer.ffn), late=of(layer.late)) for layer in spec.layers))
