"""`ExpertExchange`: brings tokens to the devices that have the experts they chose, and what these return back.

Two ways have the same result: every device gets the tokens of all replicas, or each token goes where it is wanted.
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import jax
import jax.numpy as jnp

from sharding.axis import ModelAxis, ReplicaAxis
from sharding.whole_mesh import RaggedSizes, WholeMesh

NOWHERE = -1  # in place of the experts of a token that is not needed


@dataclass(frozen=True)
class Choices:
    """The experts that each of T tokens has chosen."""

    experts: jax.Array  # i32[T, k]
    counts: jax.Array  # f32[T, k]: how much each of them counts
    is_needed: jax.Array | None  # bool[T]: see `LayerInput`; None: all tokens are needed
    adapters: jax.Array | None = None  # i32[T]: the slots of their adapters, see `RowAdapters`; None: no token has one


class ExpertExchange(Protocol):
    """Brings tokens to experts and back. A device computes the rows of those experts that it holds.

    Tokens of all replicas have one numbering. `held` i32[tokens, k] says where each of them finds its experts: their
    numbers, or those of their slots, or NOWHERE.
    """

    def of_all(self, choices: Choices) -> Choices:
        """Returns the choices of the tokens of all replicas, from those of this replica."""

    def states(self, x: jax.Array, held: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the hidden states of `tokens` i32[R], [R, E], from those of this replica, x [T, E].

        A token that has no expert on this device gets an arbitrary one.
        """

    def sums(self, y: jax.Array, places: jax.Array, held: jax.Array, factors: jax.Array) -> jax.Array:
        """Returns the sums of what the experts return for each token of this replica, in the dtype of y.

        y  # [R, E]: of this device's experts, one after the other, each in the order of its tokens
        places  # i32[tokens * k]: where in y each of them is, if it is there
        factors  # f32[tokens, k]: what multiplies them
        It is this device's part of the sums, or the whole. Rows are added up in float32.
        """


@dataclass(frozen=True)
class GatherExchange:
    """The tokens of all replicas come to every device, and sums go back, by an all-gather and a reduce-scatter.

    With replicas of size 1 nothing is sent. Each device returns its part of the sums over `axis`, but where `is_exact`
    the whole: then no bit depends on which device holds an expert.
    """

    replicas: ReplicaAxis
    axis: ModelAxis
    first: jax.Array | int  # of the experts that this device holds
    num_held: int
    is_exact: bool

    def of_all(self, choices: Choices) -> Choices:
        return choices if self.replicas.size == 1 else _gathered(choices, self.replicas)

    def states(self, x: jax.Array, held: jax.Array, tokens: jax.Array) -> jax.Array:
        return self.replicas.gather(x)[tokens]

    def sums(self, y: jax.Array, places: jax.Array, held: jax.Array, factors: jax.Array) -> jax.Array:
        is_here = (held >= self.first) & (held < self.first + self.num_held)
        parts = y, places.reshape(held.shape), is_here, factors
        if self.is_exact:
            return self.axis.sum_terms(_terms(*parts), self.replicas).astype(y.dtype)
        # Each token adds up its experts in the order of its choice, whoever else is in the step.
        sums = jax.lax.platform_dependent(*parts, cpu=_sum_in_turn, default=lambda *parts: _terms(*parts).sum(1))
        return self.replicas.own_sum(sums.astype(y.dtype))


def _terms(y: jax.Array, places: jax.Array, is_here: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns what the experts at `places` [..] return, times `factors`, and zeros for those that are elsewhere."""
    return jnp.where(is_here[..., None], y[places].astype(jnp.float32) * factors[..., None], 0)


def _sum_in_turn(y: jax.Array, *of_experts: jax.Array) -> jax.Array:
    """Returns the sums of the terms of each token, one expert of all tokens after the other.

    XLA:CPU has vectors for that, and none for a reduction of gathered rows, where 512 tokens of four experts took
    255 us and not 106 (512 features, one thread of Zen 4).
    """
    num_terms = of_experts[0].shape[1]
    return reduce(jnp.add, (_terms(y, *(x[:, nth] for x in of_experts)) for nth in range(num_terms)))


@dataclass(frozen=True)
class AllToAllExchange:
    """Each token goes once to every device that holds one of its experts, and what each expert returns comes back.

    The tokens of a replica are shared out among its devices, each of which sends its own. What comes back is added up
    there, in the order in which a token has chosen, so that no bit depends on the mesh or on where experts are. Then
    all devices of the replica get the sums of all its tokens.

    Every device has room for the case that all tokens choose its experts: that of the tokens of all replicas.
    """

    mesh: WholeMesh
    num_held: int  # experts of each device

    def of_all(self, choices: Choices) -> Choices:
        """Returns the choices of all tokens, and of padding, so that a device's share of a replica has one size."""
        assert choices.is_needed is not None, "a step knows its padding"
        more = -len(choices.experts) % self.mesh.axis.size
        experts, counts = (jnp.pad(x, ((0, more), (0, 0))) for x in (choices.experts, choices.counts))
        adapters = None if choices.adapters is None else jnp.pad(choices.adapters, (0, more))
        is_needed = jnp.pad(choices.is_needed, (0, more))
        return _gathered(Choices(experts, counts, is_needed, adapters), self.mesh.replicas)

    def states(self, x: jax.Array, held: jax.Array, tokens: jax.Array) -> jax.Array:
        holders, size = self._holders(held), self.mesh.size
        share = len(held) // size  # tokens that each device sends
        devices = jnp.arange(size)
        is_sent = (self._own(holders)[..., None] == devices).any(1).T  # [N, share]
        is_wanted = (holders == self.mesh.index).any(1).reshape(size, share)
        sent = is_sent.sum(1, dtype=jnp.int32)
        room = share * min(held.shape[1], size)
        rows = jnp.argsort(~is_sent.reshape(-1), stable=True)[:room] % share  # those for the first device come first
        sizes = RaggedSizes(
            firsts=jnp.cumsum(sent) - sent,
            sent=sent,
            places=jnp.full(size, self.mesh.index * share),
            received=is_wanted.sum(1, dtype=jnp.int32),
        )
        arrived = self.mesh.exchange(self.mesh.axis.own_rows(x)[rows], sizes, len(held))
        # A device's tokens arrive one after the other, where all of them would have room.
        place = devices[:, None] * share + jnp.cumsum(is_wanted, axis=1) - 1
        return arrived[place.reshape(-1)[tokens]]

    def sums(self, y: jax.Array, places: jax.Array, held: jax.Array, factors: jax.Array) -> jax.Array:
        mesh, each = self.mesh, self.num_held
        numbers = jnp.arange(mesh.size * each)  # of all experts, or slots
        of_devices = held.reshape(mesh.size, -1)  # of the tokens of each device
        here = mesh.index * each + jnp.arange(each)
        # The rows of an expert are in the order of their tokens, so that those for a device follow each other: y is
        # sent as it is. A copy in another order would have the room for the case that all tokens come.
        sent = (of_devices[:, None] == here[:, None]).sum(-1, dtype=jnp.int32)  # [devices, each]
        before = (jnp.cumsum(sent.T.reshape(-1)) - sent.T.reshape(-1)).reshape(each, mesh.size).T
        # A device gets the rows of the first expert first.
        below = (of_devices[:, None] >= 0) & (of_devices[:, None] < here[:, None])
        own = self._own(held)
        sizes = RaggedSizes(
            firsts=before.reshape(-1),
            sent=sent.reshape(-1),
            places=below.sum(-1, dtype=jnp.int32).reshape(-1),
            received=(own.reshape(-1) == numbers[:, None]).sum(1, dtype=jnp.int32),
        )
        is_held = (own >= 0) & (own < len(numbers))
        back = mesh.exchange(y, sizes, own.size)[_ranks(jnp.where(is_held, own, len(numbers)).reshape(-1))]
        # Nothing is sent for the experts of padding, whose rows are the last ones, zeros.
        terms = back.reshape(*own.shape, -1).astype(jnp.float32) * self._own(factors)[..., None]
        return mesh.axis.all_rows(terms.sum(1).astype(y.dtype), len(held) // mesh.replicas.size)

    def _holders(self, held: jax.Array) -> jax.Array:
        """Returns the device that holds each expert, i32[tokens, k], or the number of devices where none does."""
        is_held = (held >= 0) & (held < self.mesh.size * self.num_held)
        return jnp.where(is_held, held // self.num_held, self.mesh.size)

    def _own(self, of_tokens: jax.Array) -> jax.Array:
        """Returns the rows of the tokens that this device sends."""
        share = len(of_tokens) // self.mesh.size
        return jax.lax.dynamic_slice_in_dim(of_tokens, self.mesh.index * share, share)


def _gathered(choices: Choices, replicas: ReplicaAxis) -> Choices:
    """Returns the choices of the tokens of all replicas, by one small all-gather."""
    assert choices.is_needed is not None, "a step knows its padding"
    each = choices.experts.shape[1]
    counts = jax.lax.bitcast_convert_type(choices.counts, jnp.int32)
    columns = [choices.experts, counts, choices.is_needed[:, None].astype(jnp.int32)]
    if choices.adapters is not None:
        columns.append(choices.adapters[:, None])
    words = replicas.gather(jnp.concatenate(columns, axis=1))
    counts = jax.lax.bitcast_convert_type(words[:, each : 2 * each], jnp.float32)
    adapters = None if choices.adapters is None else words[:, -1]
    return Choices(words[:, :each], counts, words[:, 2 * each] != 0, adapters)


def _ranks(keys: jax.Array) -> jax.Array:
    """Returns the place of each of the keys [N] in their order."""
    order = jnp.argsort(keys, stable=True)
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))


def sent_by_gather(num_replicas: int, size: int) -> float:
    """Returns how much each device puts on its links in a layer of experts, in hidden states of a replica's tokens.

    It is an all-gather, a reduce-scatter, and an all-reduce over the `size` devices of a replica, which are the same on
    a ring, a torus and a switch.
    """
    return 2 * (num_replicas - 1) + 2 * (size - 1) / size


def sent_by_all_to_all(num_replicas: int, size: int, top_k: int, has_shared: bool, hops: float = 1.0) -> float:
    """Returns the same for the all-to-all, if each expert is as likely as the others to be chosen.

    A token goes to each of the other devices that has one of its experts, and what each of these experts returns comes
    back. Then the devices of a replica gather its sums. An FFN beside the experts has an all-reduce of its own.
    hops: the links between two devices, on average. A switch is one.
    """
    num_devices = num_replicas * size
    others = 1 - 1 / num_devices
    sent = (num_devices - 1) * (1 - others**top_k) + top_k * others
    return sent * hops / size + (3 if has_shared else 1) * (size - 1) / size


def torus_hops(num_devices: int) -> float:
    """Returns the links between two of the devices of a square torus, on average."""
    return math.sqrt(num_devices) / 2 * num_devices / (num_devices - 1)


@dataclass(frozen=True)
class ExchangeChoice:
    """Chooses how tokens come to the experts that replicas share, unless `all_to_all` says it."""

    platform: str  # JAX's name for that of the devices
    size: int  # devices of each replica
    all_to_all: bool | None = None  # None: what sends less, where the all-to-all is known to use the links

    def sends_apart(self, num_replicas: int, top_k: int, has_shared: bool) -> bool:
        """Returns whether a token is sent only to devices that have experts of it."""
        if num_replicas == 1 or self.all_to_all is not None:
            return num_replicas > 1 and bool(self.all_to_all)
        if self.platform != "tpu":
            # XLA has none for CPUs. Between the GPUs of one machine it reached 2% of the links (openxla/xla#33386).
            return False
        hops = torus_hops(num_replicas * self.size)
        sent = sent_by_all_to_all(num_replicas, self.size, top_k, has_shared, hops)
        return sent < sent_by_gather(num_replicas, self.size)
