"""`WholeMesh.exchange` puts every row where its sender says, whatever the sizes are."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from sharding.axis import ModelAxis, ReplicaAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import DATA, MODEL
from sharding.whole_mesh import RaggedSizes, WholeMesh

SIZE, MOST, ROOM = 4, 3, 14  # devices, rows for each of them, and rows of a result: two stay empty

SENDS = st.lists(st.integers(0, MOST), min_size=SIZE**2, max_size=SIZE**2)


@jax.jit
def exchanged(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    def run(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        axis = WholeMesh(ReplicaAxis(2), ModelAxis(2))
        return jnp.concatenate([axis.exchange(rows[0], RaggedSizes(*sizes[0]), ROOM), axis.index[None, None]])[None]

    over = PartitionSpec((DATA, MODEL))
    mesh = make_mesh(MeshShape(2, 2), jax.devices())
    run_on_all = jax.shard_map(run, mesh=mesh, in_specs=(over, over), out_specs=over, check_vma=False)
    out: jax.Array = run_on_all(rows, sizes)
    return out


@given(SENDS)
@example([0] * SIZE**2)
@example([MOST] * SIZE**2)
@settings(max_examples=20, deadline=None)
def test_rows_come_where_their_sender_says(sends: list[int]) -> None:
    sent: NDArray[np.int32] = np.array(sends, np.int32).reshape(SIZE, SIZE)  # [from, to]
    firsts = np.cumsum(sent, axis=1) - sent
    places = 2 + np.cumsum(sent, axis=0) - sent  # [from, to]: the first two rows of a result stay empty
    rows = np.arange(1, 1 + SIZE * SIZE * MOST, dtype=np.int32).reshape(SIZE, -1, 1)
    sizes = np.stack([firsts, sent, places, sent.T], axis=1).astype(np.int32)
    expected = np.zeros((SIZE, ROOM + 1, 1), np.int32)
    expected[:, -1, 0] = range(SIZE)
    for sender in range(SIZE):
        for to in range(SIZE):
            for number in range(sent[sender, to]):
                expected[to, places[sender, to] + number] = rows[sender, firsts[sender, to] + number]
    np.testing.assert_array_equal(exchanged(rows, sizes), expected)
