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

SIZE, PIECES, MOST = 4, 2, 3  # devices, pieces for each of them, and rows of each piece
ROOM = 2 + SIZE * PIECES * MOST  # of a result, of which two rows stay empty

SENDS = st.lists(st.integers(0, MOST), min_size=SIZE**2 * PIECES, max_size=SIZE**2 * PIECES)


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
@example([0] * SIZE**2 * PIECES)
@example([MOST] * SIZE**2 * PIECES)
@settings(max_examples=20, deadline=None)
def test_rows_come_where_their_sender_says(sends: list[int]) -> None:
    sent: NDArray[np.int32] = np.array(sends, np.int32).reshape(SIZE, SIZE, PIECES)  # [from, to, piece]
    by_sender, by_receiver = sent.reshape(SIZE, -1), sent.swapaxes(0, 1).reshape(SIZE, -1)
    firsts = (np.cumsum(by_sender, axis=1) - by_sender).reshape(sent.shape)
    places = 2 + (np.cumsum(by_receiver, axis=1) - by_receiver).reshape(sent.shape).swapaxes(0, 1)
    rows = np.arange(1, 1 + SIZE * SIZE * PIECES * MOST, dtype=np.int32).reshape(SIZE, -1, 1)
    expected = np.zeros((SIZE, ROOM + 1, 1), np.int32)
    expected[:, -1, 0] = range(SIZE)
    for sender, to, piece in np.ndindex(sent.shape):
        of_piece = np.arange(sent[sender, to, piece])
        expected[to, places[sender, to, piece] + of_piece] = rows[sender, firsts[sender, to, piece] + of_piece]
    sizes = np.stack([firsts, sent, places, sent.swapaxes(0, 1)], axis=1).reshape(SIZE, 4, -1)
    np.testing.assert_array_equal(exchanged(rows, sizes.astype(np.int32)), expected)
