"""`WholeMesh`: messages among all devices of all replicas, whose sizes are known only while the step runs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sharding.axis import ModelAxis, ReplicaAxis
from sharding.rules import DATA, MODEL

_ALL = (DATA, MODEL)


@dataclass(frozen=True)
class RaggedSizes:
    """Says which rows one of N devices sends to each of them, itself included, and gets from it.

    There are S pieces for each device, and all arrays are i32[N * S], those of the first device first.
    """

    firsts: jax.Array  # the first row of each piece, which has rows that follow each other
    sent: jax.Array  # how many these are
    places: jax.Array  # where they begin in the other device's result
    received: jax.Array  # how many rows each device's pieces for this one have


@dataclass(frozen=True)
class WholeMesh:
    """All devices of the replicas that share experts, inside `jax.shard_map`, in the order in which they hold these."""

    replicas: ReplicaAxis
    axis: ModelAxis

    @property
    def size(self) -> int:
        return self.replicas.size * self.axis.size

    @property
    def index(self) -> jax.Array:
        """The number of this device."""
        return jnp.asarray(self.replicas.first(self.axis.size) + self.axis.first(1), jnp.int32)

    def exchange(self, rows: jax.Array, sizes: RaggedSizes, room: int) -> jax.Array:
        """Returns the rows [room, E] that all devices have sent to this one, from `rows` [R, E] of each.

        They are where their senders have placed them, and zeros are elsewhere. On TPUs and GPUs it is a ragged
        all-to-all, which sends these rows and no others. XLA has none for CPUs, whose devices gather all rows.
        """
        return jax.lax.platform_dependent(
            rows,
            jnp.zeros((room, rows.shape[1]), rows.dtype),
            jnp.stack([sizes.firsts, sizes.sent, sizes.places, sizes.received]),
            cpu=self._selected,
            default=self._ragged,
        )

    def _ragged(self, rows: jax.Array, result: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(rows, result, *sizes, axis_name=_ALL)

    def _selected(self, rows: jax.Array, result: jax.Array, sizes: jax.Array) -> jax.Array:
        # Of each device the pieces for this one, [N * S] of all.
        each = sizes.shape[1] // self.size
        of_all = jax.lax.all_gather(sizes[:3].reshape(3, self.size, each), _ALL)[:, :, self.index]
        firsts, sent, places = of_all.swapaxes(0, 1).reshape(3, -1)
        rows = jax.lax.all_gather(rows, _ALL)  # [N, R, E]
        row = jnp.arange(len(result))
        is_of = (row >= places[:, None]) & (row < (places + sent)[:, None])  # [N * S, room]
        piece = is_of.argmax(0)
        return jnp.where(is_of.any(0)[:, None], rows[piece // each, row - places[piece] + firsts[piece]], result)
