"""`TableArrays`: the arrays of embeddings and LM heads that adapters bring along whole, of a model on its devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.choice import Forms
from jaxvllm.models.saved_tables import SavedTables
from jaxvllm.models.shards import sharding_on, zeros_on
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.tiling import aligned_zeros
from sharding.rules import DATA


@dataclass(frozen=True, eq=False)
class TableArrays:
    """Makes the arrays for `room`, of a model that is divided among `num_shards` devices."""

    room: SavedTables
    spec: ModelSpec
    num_shards: int
    dtype: np.dtype
    forms: Forms

    def empty(self, mesh: Mesh) -> dict[str, list[Any]]:
        """Returns the tables of all slots with room, by their names. The replicas of the mesh have their own."""
        zeros = partial(zeros_on, dtype=self.dtype, sharding_of=sharding_on(mesh))
        count, slots = mesh.shape[DATA], range(self.room.num_slots)
        return {name: [self._node(zeros, count) for _ in slots] for name in self.room.names}

    def of_adapter(self, tables: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns tables [V, E] on the host as the devices have them, whose rows and columns may be filled up."""

        def filled_up(decl: ParamDecl, table: np.ndarray) -> np.ndarray:
            out = aligned_zeros(decl.shape, self.dtype)
            out[: table.shape[0], : table.shape[1]] = table
            return out

        return {name: self._node(partial(filled_up, table=table)) for name, table in tables.items()}

    def like(self) -> dict[str, Any]:
        """Returns all tables that an adapter may have, with zeros that take no memory."""
        zeros = self._node(lambda decl: np.broadcast_to(np.zeros((), self.dtype), decl.shape))
        return dict.fromkeys(self.room.names, zeros)

    def _node(self, array: Callable[[ParamDecl], Any], num_replicas: int = 1) -> Any:
        whole = Spread(self.spec, self.num_shards).whole
        shape = (num_replicas * whole.vocab_size, whole.hidden_size)
        decl = ParamDecl(shape, ("vocab_of_replicas", "embed"), "zeros", storage="matrix")
        form = self.forms.of_saved_table(decl)
        return form.wrapped({name: array(own) for name, own in form.declare(decl).items()})


def with_table(before: Sequence[Any], slot: int, new: Any, replica: int, num_replicas: int) -> list[Any]:
    """Returns the tables of all slots, with a new one from the host in a slot of a replica.

    The devices give up what was there before, so that they need no room for one more.
    """
    put = partial(_put, replica=replica, num_replicas=num_replicas)
    return [jax.tree.map(put, old, new) if number == slot else old for number, old in enumerate(before, 1)]


def _put(before: jax.Array, new: np.ndarray, replica: int, num_replicas: int) -> jax.Array:
    rows = before.shape[0] // num_replicas
    shards = []
    for shard in before.addressable_shards:
        first, data = shard.index[0].start or 0, shard.data
        if first // rows == replica:
            own = new[first % rows :][: len(data)]
            data.delete()
            data = jax.device_put(own, shard.device)
        shards.append(data)
    return jax.make_array_from_single_device_arrays(before.shape, before.sharding, shards)
