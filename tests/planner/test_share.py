"""A device's share in bytes and operations, against the arrays themselves."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxvllm.models.params import abstract_params
from jaxvllm.models.spread import Spread
from jaxvllm.planner.share import Share
from jaxvllm.runtime.cache_shape import CacheShape
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.planner.deployments import TINY, deployment

MODELS = {"tiny": TINY, "untied": "Qwen2.5-7B", "tied": "gemma-2-2b"}


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@pytest.mark.parametrize("shape", ["1x1", "1x2", "1x8", "2x1x2"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_those_of_the_shards(model, shape):
    planned = deployment(MODELS[model], "h200", mesh=shape, dtype="bfloat16")
    mesh = make_mesh(MeshShape.parse(shape), jax.devices())
    params = abstract_params(planned.spec, jnp.bfloat16, "stacked", mesh)
    assert planned.share.weight_bytes == sum(map(shard_bytes, jax.tree.leaves(params)))
    read = {name: value for name, value in params.items() if name != "embed" or planned.spec.tie_embeddings}
    assert planned.share.bytes_read == sum(map(shard_bytes, jax.tree.leaves(read)))
    assert planned.share.layer_bytes == sum(map(shard_bytes, jax.tree.leaves(params["layers"])))
    assert planned.share.smallest_matrix_bytes == min(
        shard_bytes(params["layers"][name]) // len(planned.spread.stage_layers[0])
        for name in ("qkv", "o", "gate_up", "down")
    )
    pages = CacheShape(6, 16, 1, 1, jnp.dtype(jnp.bfloat16), 16).pages(planned.spec, planned.backend, mesh)
    assert 6 * planned.page_bytes == sum(map(shard_bytes, pages))


def test_stages_that_differ_have_room_for_the_most_layers_of_a_kind():
    planned = deployment("DeepSeek-V2-Lite", "h200", mesh="2x1x2", dtype="bfloat16")
    mesh = make_mesh(MeshShape.parse("2x1x2"), jax.devices())
    params, share = abstract_params(planned.spec, jnp.bfloat16, "stacked", mesh), planned.share
    assert share.weight_bytes == sum(map(shard_bytes, jax.tree.leaves(params)))
    # One dense layer and 13 with experts, and 13 with experts: the second has room for a dense layer that it has not.
    alone = Share(Spread(planned.spec, 2), jnp.dtype("bfloat16"))
    assert share.layer_bytes == alone.layer_bytes / 2
    assert share.empty_bytes == share.weight_bytes - (share.bytes_read + shard_bytes(params["embed"]))
    dense = planned.spread.shard.layers[0]
    assert share.empty_bytes == 2 * sum(math.prod(decl.shape) for decl in dense.declare().values()) / 2


def test_replicas_share_experts_and_nothing_else():
    options = dict(dtype="bfloat16", enable_expert_parallel=True)
    shared, one = (deployment("Qwen3-30B-A3B", "h200", mesh=mesh, **options) for mesh in ("2x4", "1x4"))
    params = abstract_params(shared.spec, jnp.bfloat16, "stacked", make_mesh(MeshShape.parse("2x4"), jax.devices()))
    assert shared.share.weight_bytes == sum(map(shard_bytes, jax.tree.leaves(params)))
    assert shared.share.expert_bytes == one.share.expert_bytes / 2
    assert shared.share.bytes_read - shared.share.expert_bytes == one.share.bytes_read - one.share.expert_bytes
    # A device has half as many experts, to which twice as many tokens come.
    assert shared.share.flops(8, 8) == one.share.flops(8, 8)
    assert (shared.compiled_mesh, one.compiled_mesh) == (MeshShape(2, 4), MeshShape(1, 4))


def test_operations_are_two_a_weight_and_token():
    spec = deployment("Llama-3.1-8B", "v5e").spec
    # Of 8.03 billion parameters, 2 x 525 million are embedding and head, and norms have 266 thousand.
    share = Share(Spread(spec), jnp.dtype("bfloat16"))
    assert share.flops(1, 0) == 2 * (8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096)
    assert share.flops(0, 1) == 2 * 128256 * 4096
    assert share.flops(10, 3) == 10 * share.flops(1, 0) + 3 * share.flops(0, 1)
    assert Share(Spread(spec, 8), jnp.dtype("float32")).flops(8, 8) == share.flops(1, 1)
