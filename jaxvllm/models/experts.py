"""`ExpertsFfn`: a feed-forward network of many parts, the experts, of which each token goes through a few.

Rows are sorted by the expert that they go to, and multiplied by group (`pallas_kernels.grouped_matmul`). So the
matrices of experts that nobody has chosen are not read, and no array has a dimension of tokens and one of experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.ffn import Ffn, GatedFfn
from jaxvllm.models.forms.form import Gating
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.linear import Linear
from jaxvllm.models.norm import bias_of
from jaxvllm.models.ops import project, project_grouped, project_grouped_gated
from jaxvllm.models.positive import require_positive
from jaxvllm.models.spec import ModelSpec

_SHARED = "shared_"  # before the names of the arrays of the shared expert


@dataclass(frozen=True)
class ExpertsFfn:
    """Gated experts of one size (arXiv 2101.03961), and perhaps one beside them through which every token goes.

    A device has a part of each expert or, with `is_by_expert`, some experts whole: then it computes the rows that have
    chosen one of these. Either way its output is its part of a sum, to which all devices contribute once.
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
    num_shards: int = 1  # devices that have a part of it

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size size num_shards")
        assert not self.bias or (self.output_scale == 1 and not self.weighs_input), "no model has both"

    @property
    def num_held(self) -> int:
        """The experts of which a device has matrices."""
        return self._num_real // (self.num_shards if self.is_by_expert else 1)

    @property
    def _num_real(self) -> int:
        """The experts that have matrices."""
        return self.router.num_experts - self.num_identities

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
        return Linear((self.num_held, *shape), axes, bias, chosen=(self.router.top_k, self.router.num_experts))

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
        return decls

    def problem(self, size: int) -> str | None:
        count, inner = self._num_real, self.size
        if self.is_by_expert and count % size:
            return f"{count} experts do not divide over {size} devices"
        if not self.is_by_expert and inner % size:
            return f"experts of size {inner} do not divide over {size} devices"
        return None if self.shared is None else self.shared.problem(size)

    def shard(self, size: int) -> Self:
        shared = None if self.shared is None else self.shared.shard(size)
        inner = self.size if self.is_by_expert else self.size // size
        return replace(self, size=inner, shared=shared, num_shards=size)

    def apply(self, weights: Mapping[str, Any], x: jax.Array, given: LayerInput) -> jax.Array:
        chosen, counts = self.router.choose(weights, x)
        out = self._chosen(weights, x, chosen, counts, given)
        if self.shared is not None:
            out = out + self._shared(weights, x, self.shared)
        if self.output_scale != 1:
            out = out * jnp.asarray(self.output_scale, out.dtype)
        out = given.axis.sum(out)
        if self.num_identities:
            kept = jnp.where(chosen >= self._num_real, counts, 0).sum(-1, keepdims=True)
            out = out + (x.astype(jnp.float32) * kept).astype(out.dtype)
        if not self.bias:
            return out
        # Every device has all of these, and adds them once, after the sum.
        biases = weights[bias_of("experts_down")][chosen].astype(jnp.float32) * counts[..., None]
        return out + biases.sum(1).astype(out.dtype)

    def _chosen(
        self, weights: Mapping[str, Any], x: jax.Array, chosen: jax.Array, counts: jax.Array, given: LayerInput
    ) -> jax.Array:
        """Returns this device's part of what the chosen experts return for x [T, E], without the shared one."""
        num_tokens, each = chosen.shape
        own = chosen - given.axis.first(self.num_held) if self.is_by_expert else chosen
        is_here = (own >= 0) & (own < self.num_held)
        if given.is_real is not None:  # padding chooses no expert, whose matrices would be read for nothing
            is_here &= given.is_real[:, None]
        # Rows of experts that are elsewhere come last, and are not computed.
        expert = jnp.where(is_here, own, self.num_held).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        # The rows before each expert. A search among sorted rows is a loop, and took 15 us a layer (CPU, 16 tokens).
        starts = (expert < jnp.arange(self.num_held + 1)[:, None]).sum(1, dtype=jnp.int32)
        rows = x[order // each]
        if self.weighs_input:
            rows = rows * counts.reshape(-1)[order][:, None].astype(x.dtype)
        h = self._inner(weights, rows, starts)
        y = project_grouped(h, weights["experts_down"], starts)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        # Each token adds up its experts in the order of its choice, whoever else is in the step.
        of_tokens = y[place].reshape(num_tokens, each, -1)
        counted = of_tokens.astype(jnp.float32) * (1 if self.weighs_input else counts[..., None])
        return jnp.where(is_here[..., None], counted, 0).sum(1).astype(x.dtype)

    def _inner(self, weights: Mapping[str, Any], rows: jax.Array, starts: jax.Array) -> jax.Array:
        """Returns the inner features of rows that are sorted by expert."""
        bias = None
        if self.bias:  # rows of no expert may have any
            expert = jnp.searchsorted(starts, jnp.arange(len(rows)), side="right") - 1
            bias = jnp.take(weights[bias_of("experts_gate_up")], expert, axis=0, mode="clip")
        return project_grouped_gated(rows, weights["experts_gate_up"], starts, self.activation, bias)

    def _shared(self, weights: Mapping[str, Any], x: jax.Array, shared: GatedFfn) -> jax.Array:
        """Returns this device's part of what the shared expert returns."""
        of_shared = {name: weights[_SHARED + name] for name in shared.declare()}
        h = shared.gate_up.apply_gated(of_shared, "gate_up", x, shared.activation)
        out = project(h, of_shared["down"])
        if not self.is_shared_gated:
            return out
        return out * jax.nn.sigmoid(self.shared_gate.apply(weights, "shared_gate", x))


def by_expert(spec: ModelSpec) -> ModelSpec:
    """Returns the spec whose devices have some experts whole, instead of a part of each.

    Raises ValueError for a model without experts.
    """
    if not any(isinstance(ffn, ExpertsFfn) for layer in spec.layers for ffn in (layer.ffn, layer.late)):
        raise ValueError("enable_expert_parallel needs a model with experts, and this one has none: leave it out")

    def of[Kind: Ffn | None](ffn: Kind) -> Kind:
        return replace(ffn, is_by_expert=True) if isinstance(ffn, ExpertsFfn) else ffn

    return replace(spec, layers=tuple(replace(layer, ffn=of(layer.ffn), late=of(layer.late)) for layer in spec.layers))
