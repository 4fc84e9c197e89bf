"""Weights in the host's memory: they come back with the same bits to the same places, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.runtime.parked_params import ParkedArray, are_dropped, are_parked, parked, restored


def test_a_tree_on_a_mesh_comes_back_as_it_was() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    specs = (PartitionSpec("model"), PartitionSpec(None, "model"), PartitionSpec(), PartitionSpec("data", "model"))
    dtypes = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4)
    arrays = [
        jax.device_put(jnp.arange(32).reshape(4, 8).astype(dtype), NamedSharding(mesh, spec))
        for spec, dtype in zip(specs, dtypes, strict=True)
    ]
    tree = {"embed": arrays[0], "layers": [{"w": arrays[1]}, {"w": arrays[2]}], "lm_head": arrays[3]}
    away = parked(tree, keeps=True)
    assert are_parked(away) and not are_dropped(away) and not are_parked(tree)
    # Each part is kept once, on however many devices it is.
    kept = away["layers"][1]["w"]
    assert isinstance(kept, ParkedArray) and kept.parts is not None
    assert [part.shape for part in kept.parts.values()] == [(4, 8)]
    before = [np.array(array) for array in arrays]
    for array in arrays:
        array.delete()
    back = restored(away)
    assert not are_parked(back)
    for new, old, like in zip(jax.tree.leaves(back), before, jax.tree.leaves(away), strict=True):
        assert (new.dtype, new.sharding) == (like.dtype, like.sharding)
        np.testing.assert_array_equal(np.array(new), old)


def test_what_is_dropped_says_what_it_was_like() -> None:
    tree = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    # Weights that are in the host's memory already may be dropped, too.
    for gone in (parked(tree, keeps=False), parked(parked(tree, keeps=True), keeps=False)):
        assert are_dropped(gone)
        assert (gone["w"].shape, gone["w"].dtype, gone["w"].sharding) == ((2, 3), jnp.bfloat16, tree["w"].sharding)
