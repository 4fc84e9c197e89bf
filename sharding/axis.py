"""The collectives of a step: all messages between the devices that share one model, or its experts."""

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from sharding.rules import DATA, MODEL, STAGE


@partial(jax.tree_util.register_dataclass, data_fields=["trees"], meta_fields=[])
@dataclass(frozen=True)
class EachReplica:
    """A tree of arrays of each of several replicas. Every device of their mesh has all of them."""

    trees: tuple[Any, ...]


@dataclass(frozen=True)
class ReplicaAxis:
    """The mesh axis of the replicas that share experts, inside `jax.shard_map`. With size 1 nothing is sent.

    Devices that have the same place in their replicas send each other tokens, and results where one process reads those
    of other processes' devices.
    """

    size: int = 1

    def first(self, count: int) -> jax.Array | int:
        """Returns where the share of this device's replica begins in an axis of which each replica has `count`."""
        return 0 if self.size == 1 else jax.lax.axis_index(DATA) * count

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns the rows [T, ..] of all replicas, [size * T, ..], by an all-gather."""
        return x if self.size == 1 else jax.lax.all_gather(x, DATA, tiled=True)

    def own_sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over replicas of this replica's rows [T, ..] of x [size * T, ..], by a reduce-scatter."""
        return x if self.size == 1 else jax.lax.psum_scatter(x, DATA, tiled=True)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over replicas on each of them, by an all-reduce."""
        return x if self.size == 1 else jax.lax.psum(x, DATA)

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over replicas on each of them, by an all-reduce."""
        return x if self.size == 1 else jax.lax.pmax(x, DATA)

    def each(self, tree: Any) -> EachReplica:
        """Returns the `tree` of each replica on all of them, by an all-gather of each array."""
        gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, DATA), tree)
        return EachReplica(tuple(jax.tree.map(itemgetter(index), gathered) for index in range(self.size)))

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this replica's rows [T, ..] of x [size * T, ..], which every replica has."""
        count = len(x) // self.size
        return x if self.size == 1 else jax.lax.dynamic_slice_in_dim(x, self.first(count), count)


NO_OTHERS = ReplicaAxis()


@dataclass(frozen=True)
class ModelAxis:
    """The mesh axis over which a model is split, inside `jax.shard_map`. With size 1 (no shard_map) nothing is sent.

    Every collective of a step is one of these methods. Nothing is left to a compiler's partitioner.
    """

    size: int = 1

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all devices on each of them, by an all-reduce."""
        return x if self.size == 1 else jax.lax.psum(x, MODEL)

    def sum_terms(self, terms: jax.Array, replicas: ReplicaAxis = NO_OTHERS) -> jax.Array:
        """Returns the sums f32[T, E] over terms f32[T, N, E], each of which all devices but one have as 0.

        The terms are those of the rows of all `replicas`, of which each gets the sums of its own.
        No bit depends on which device has a term. Float sums would: so the terms of a row become integers, whose sum is
        exact, in units of a power of two. With up to 64 terms the largest one keeps all of its 24 bits. A row with a
        term that is no finite number is NaN.
        """
        num_bits = 30 - (terms.shape[1] - 1).bit_length()
        exponents = (jax.lax.bitcast_convert_type(terms, jnp.int32) >> 23) & 0xFF  # biased; 255: no finite number
        largest = exponents.max((1, 2))
        if self.size > 1:
            largest = jax.lax.pmax(largest, MODEL)
        largest = replicas.max(largest)
        is_finite, largest = largest < 0xFF, jnp.clip(largest, num_bits, 0xFE)
        # Each term is below 2**(largest - 126), and becomes an integer below 2**num_bits.
        scale = _power_of_two(num_bits + 126 - largest)[:, None, None]
        total = self.sum(replicas.own_sum(jnp.round(terms * scale).astype(jnp.int32).sum(1)))
        unit = _power_of_two(replicas.own(largest) - 126 - num_bits)[:, None]
        return jnp.where(replicas.own(is_finite)[:, None], total.astype(jnp.float32) * unit, jnp.nan)

    def mean(self, x: jax.Array) -> jax.Array:
        """Returns the mean over all devices on each of them, by an all-reduce."""
        return x if self.size == 1 else jax.lax.pmean(x, MODEL)

    def first(self, count: int) -> jax.Array | int:
        """Returns where this device's share begins in an axis of which each device has `count`."""
        return 0 if self.size == 1 else jax.lax.axis_index(MODEL) * count

    def stack(self, x: jax.Array) -> jax.Array:
        """Returns the `x` of all devices [size, ...] on each of them, by an all-gather."""
        return x[None] if self.size == 1 else jax.lax.all_gather(x, MODEL)

    def columns(self, x: jax.Array) -> jax.Array:
        """Returns this device's share of the columns of x [..., E], which every device has; `size` must divide E."""
        count = x.shape[-1] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.first(count), count, axis=-1)

    def all_columns(self, x: jax.Array) -> jax.Array:
        """Inverts `columns`, by an all-gather."""
        return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)

    # Sampling is shared out by rows: from logits [R, V / size] each device gets some whole rows. No device ever holds
    # the logits of the whole batch, and the computation of a row is the same as on one device, bit for bit.

    def exchange(self, x: jax.Array) -> jax.Array:
        """Turns [R, V / size] into [ceil(R / size), V], this device's rows with all columns, by an all-to-all."""
        if self.size == 1:
            return x
        return jax.lax.all_to_all(self._padded(x), MODEL, split_axis=0, concat_axis=1, tiled=True)

    def own_rows[Tree](self, tree: Tree) -> Tree:
        """Returns the rows that `exchange` gives this device, from arrays [R, ...] that every device has."""
        if self.size == 1:
            return tree

        def own(x: jax.Array) -> jax.Array:
            x = self._padded(x)
            count = len(x) // self.size
            return jax.lax.dynamic_slice_in_dim(x, self.first(count), count)

        return jax.tree.map(own, tree)

    def all_rows[Tree](self, tree: Tree, count: int) -> Tree:
        """Inverts `own_rows` for R = `count`, by an all-gather for each array."""
        if self.size == 1:
            return tree
        gather = partial(jax.lax.all_gather, axis_name=MODEL, tiled=True)
        return jax.tree.map(lambda x: gather(x)[:count], tree)

    def _padded(self, x: jax.Array) -> jax.Array:
        """Repeats rows of `x` until they divide over the devices."""
        return jnp.pad(x, ((0, -len(x) % self.size), *((0, 0),) * (x.ndim - 1)), mode="edge")


def _power_of_two(exponents: jax.Array) -> jax.Array:
    """Returns 2**exponents, f32 of i32 from -126 to 127, exactly."""
    return jax.lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)


ALONE = ModelAxis()


@dataclass(frozen=True)
class StageAxis:
    """The mesh axis over which the layers of a model are divided, inside `jax.shard_map`. With size 1 nothing is sent.

    Between stages there is no other message than the activations that `pass_on` sends, and, where loads of experts are
    counted, their `sum`.
    """

    size: int = 1

    @property
    def index(self) -> jax.Array:
        """The number of this device's stage."""
        return jax.lax.axis_index(STAGE)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all stages on each of them, by an all-reduce."""
        return jax.lax.psum(x, STAGE)

    def first(self, count: int) -> jax.Array | int:
        """Returns where this stage's share begins in an axis of which each stage has `count`."""
        return 0 if self.size == 1 else self.index * count

    def pass_on(self, x: jax.Array, axis: ModelAxis) -> jax.Array:
        """Returns the x [T, E] of the stage before, by a collective-permute; in the first stage that of the last.

        All devices of a stage have the same x. Where its columns divide over them, each sends some, and an all-gather
        within the next stage brings them together (arXiv 2104.04473): fewer bytes go from host to host.
        """
        following = [(stage, (stage + 1) % self.size) for stage in range(self.size)]
        if axis.size == 1 or x.shape[-1] % axis.size:
            return jax.lax.ppermute(x, STAGE, following)
        return axis.all_columns(jax.lax.ppermute(axis.columns(x), STAGE, following))


ONE_STAGE = StageAxis()
