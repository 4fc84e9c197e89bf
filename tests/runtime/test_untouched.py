"""Arrays on CPU that take memory where they are used, and what an engine says of its memory."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxvllm.runtime.memory import MemoryUse
from jaxvllm.runtime.recipe import Recipe
from jaxvllm.runtime.untouched import register_untouched, untouched
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

SHAPE = (8, 1024, 8, 1024)  # 256 MiB in float32


def resident_bytes() -> int:
    """Memory of this process that no file is behind."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("size", [1, 2])
def test_only_what_is_written_takes_memory(size: int) -> None:
    """Two arrays of one shape have their own memory, which nothing has copied."""
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    spec = PartitionSpec(None, None, mesh.axis_names[-1])
    struct = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, spec))
    own = jax.ShapeDtypeStruct(struct.sharding.shard_shape(SHAPE), struct.dtype)
    write = jax.jit(lambda pages, value: pages.at[3, 5].set(value), donate_argnums=0)
    write.lower(struct, 1.0).compile()
    register_untouched()
    make = Recipe(partial(untouched, (own, {"same": own})), (), mesh, out_specs=(spec, {"same": spec})).compile()
    before = resident_bytes()
    pages, other = jax.block_until_ready(make())
    assert pages.shape == SHAPE and pages.dtype == jnp.float32 and pages.sharding.is_equivalent_to(struct.sharding, 4)
    for value in (1.0, 2.0):
        pages = write(pages, value)
    others = write(other["same"], 3.0)
    assert np.all(np.asarray(pages[3, 5]) == 2) and np.all(np.asarray(others[3, 5]) == 3)
    assert resident_bytes() - before < 64 * 2**20


def test_the_table_of_memory() -> None:
    use = MemoryUse(weights=3 * 2**20, pages=2**30, num_tokens=4096, state=2**19, step=2**21, grows=True)
    assert use.table().splitlines() == [
        "  weights              3.0",
        "  KV pages         1,024.0   4,096 tokens, taken as pages fill",
        "  slots                0.5",
        "  largest step         2.0   while it runs",
        "  in all           1,029.5",
    ]
    early = replace(use, step=None).table().splitlines()
    assert early[-1] == "  in all           1,027.5   and what the largest step needs, which still compiles"
    assert len(early) == 4
