"""`ExpertRouter`: which experts a token chooses, and how much each of them counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.linear import Linear
from jaxvllm.models.positive import require_positive
from pallas_kernels.backend import Backend
from pallas_kernels.grouped_matmul import top_k

# softmax: over all experts, before the choice. sigmoid: of each expert alone. chosen: the softmax over those that were
# chosen by their logits. chosen_sigmoid: the sigmoid of each of those.
Scoring = Literal["softmax", "sigmoid", "chosen", "chosen_sigmoid"]


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of equal size, of which a token may choose from some (arXiv 2412.19437, 2.1.2).

    A group counts as much as its `best` experts together.
    """

    count: int
    kept: int
    best: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "count kept best")
        if self.kept > self.count:
            raise ValueError(f"{self.kept} of {self.count} groups of experts cannot be kept")

    def limited(self, scores: jax.Array) -> jax.Array:
        """Returns scores [T, X] with those of the groups that are left out at -inf."""
        grouped = scores.reshape(len(scores), self.count, -1)
        of_groups = jax.lax.top_k(grouped, min(self.best, grouped.shape[-1]))[0].sum(-1)
        _, kept = jax.lax.top_k(of_groups, self.kept)
        is_kept = jax.nn.one_hot(kept, self.count, dtype=bool).any(1)
        return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


@dataclass(frozen=True)
class SparseMixer:
    """Chooses one expert after the other (arXiv 2409.12136), each the best of those that are left.

    It counts as much as in the softmax over those whose logits are near its own: the distance, divided by the larger of
    their magnitude and its own logit, is at most `tolerance`.
    """

    tolerance: float

    def choose(self, logits: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
        """Returns the experts i32[T, top_k] for logits f32[T, X], and what they count, f32."""
        left, chosen, counts = logits, [], []
        for _ in range(top_k):
            best, expert = left.max(-1, keepdims=True), left.argmax(-1)
            is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > self.tolerance
            near = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left), axis=-1)
            counts.append(jnp.take_along_axis(near, expert[:, None], axis=-1))
            chosen.append(expert)
            left = jnp.where(jax.nn.one_hot(expert, logits.shape[-1], dtype=bool), -jnp.inf, left)
        return jnp.stack(chosen, axis=-1), jnp.concatenate(counts, axis=-1)


@dataclass(frozen=True)
class ExpertRouter:
    """Chooses `top_k` of `num_experts` experts for each token. All of it is computed in float32."""

    hidden_size: int
    num_experts: int
    top_k: int
    scoring: Scoring | SparseMixer = "softmax"
    is_normalized: bool = True  # what the chosen experts count adds up to one, before the scale
    added: float = 0.0  # to the sum by which they are divided
    least_sum: float = 0.0  # by which they are divided at least
    scale: float = 1.0
    has_choice_bias: bool = False  # added to the scores for the choice, and not to what an expert counts
    groups: ExpertGroups | None = None
    bias: bool = False  # of the logits
    soft_cap: float | None = None  # bounds the logits

    def __post_init__(self) -> None:
        require_positive(self, "hidden_size num_experts top_k scale soft_cap")
        if self.top_k > self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts cannot be chosen")
        if self.groups is not None and self.num_experts % self.groups.count:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.groups.count} groups")

    @property
    def logits(self) -> Linear:
        """The projection to a logit for each expert, which every device has."""
        return Linear((self.num_experts, self.hidden_size), (None, "embed"), self.bias, dtype="float32")

    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name."""
        decls = self.logits.declare("router")
        if self.has_choice_bias:
            # It only chooses: no gradient reaches it, and trainers move it by the loads of the experts.
            decls["router_choice"] = ParamDecl((self.num_experts,), (None,), "zeros", dtype="float32", is_trained=False)
        return decls

    def choose(self, weights: Mapping[str, Any], x: jax.Array, backend: Backend) -> tuple[jax.Array, jax.Array]:
        """Returns the experts i32[T, top_k] of each row of x [T, E], the best first, and what they count, f32."""
        with jax.named_scope("router"):
            logits = self.logits.apply(weights, "router", x.astype(jnp.float32))
            if self.soft_cap is not None:
                logits = jnp.tanh(logits / self.soft_cap) * self.soft_cap
            if isinstance(self.scoring, SparseMixer):
                chosen, counts = self.scoring.choose(logits, self.top_k)
                return chosen, counts * self.scale
            if self.scoring == "chosen":
                best, chosen = top_k(logits, self.top_k, backend)
                return chosen, jax.nn.softmax(best, axis=-1) * self.scale
            if self.scoring == "chosen_sigmoid":
                best, chosen = top_k(logits, self.top_k, backend)
                return chosen, self._normalized(jax.nn.sigmoid(best)) * self.scale
            scores = jax.nn.softmax(logits, axis=-1) if self.scoring == "softmax" else jax.nn.sigmoid(logits)
            wanted = scores + weights["router_choice"] if self.has_choice_bias else scores
            if self.groups is not None:
                wanted = self.groups.limited(wanted)
            _, chosen = top_k(wanted, self.top_k, backend)
            return chosen, self._normalized(jnp.take_along_axis(scores, chosen, axis=-1)) * self.scale

    def _normalized(self, counts: jax.Array) -> jax.Array:
        """Returns what the chosen experts count, so that it adds up to one where the model has it so."""
        if not self.is_normalized:
            return counts
        return counts / jnp.maximum(counts.sum(-1, keepdims=True) + self.added, self.least_sum)
