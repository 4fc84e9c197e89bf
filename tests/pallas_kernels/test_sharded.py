"""Heads spread over devices attend as on one device."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.ragged_paged_attention import NO_WINDOW
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase
from pallas_kernels.ragged_paged_attention.sharded import sharded_ragged_paged_attention
from tests.pallas_kernels.attention_call import BACKENDS, DTYPES, LAYER, Call, make_call

DECODE = RaggedCase(
    "decode", 8, 4, 64, 16, 3, (RowCase(1, 50), RowCase(1, 16), RowCase(0, 0)), sinks=True, kv_dtype="int8"
)
# The GPU's interpreter of jax 0.11.2 has one shared memory for all devices, who find each other's barriers in it.
NUM_DEVICES = {"reference": 4, "tpu": 4, "gpu": 1}
MIXED = RaggedCase("mixed", 8, 4, 64, 16, 32, (RowCase(1, 30), RowCase(20, 40)), window=33)


def lower(call: Call, backend: str, num_devices: int) -> tuple[jax.stages.Lowered, tuple[Any, ...], dict[str, Any]]:
    """The call lowered for `num_devices`, and its arguments in their places."""
    mesh = jax.make_mesh((num_devices,), ("model",), devices=jax.devices()[:num_devices])
    options = {"scale": call.case.scale, "window": call.case.window, "backend": BACKENDS[backend]}
    sharded = partial(sharded_ragged_paged_attention, mesh=mesh, axis="model", **options)

    def place(x: Any, *spec: str | None) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec))), x)

    heads = [place(x, None, "model") for x in (call.q, call.k, call.v)]
    arguments = (*heads, place(call.pages, None, None, "model"), place(np.int32(LAYER)), place(call.rows))
    extra = {"sinks": place(call.sinks, "model"), "kv_scales": place(call.kv_scales, None, "model")}
    return jax.jit(sharded).lower(*arguments, **extra), arguments, extra


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
def test_equals_dense_attention(case: RaggedCase, backend: str) -> None:
    call = make_call(case, DTYPES[backend], BACKENDS[backend])
    num_devices = NUM_DEVICES[backend]
    lowered, arguments, extra = lower(call, backend, num_devices)
    out, pages = lowered.compile()(*arguments, **extra)
    assert call.error(out) < call.tolerance
    assert len(out.sharding.device_set) == len(pages.sharding.device_set) == num_devices
    assert out.sharding.spec[1] == pages.sharding.spec[2] == "model"


def test_nothing_is_sent() -> None:
    call = make_call(MIXED)
    text = lower(call, "reference", 4)[0].compile().as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert collective not in text


def test_heads_that_do_not_divide_are_refused() -> None:
    call = make_call(RaggedCase("odd", 6, 3, 16, 16, 2, (RowCase(1, 3), RowCase(1, 1))))
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    sharded = partial(sharded_ragged_paged_attention, mesh=mesh, axis="model", scale=1.0, window=NO_WINDOW)
    with pytest.raises(ValueError, match="3 KV heads do not divide over the 2 devices of mesh axis 'model'"):
        sharded(call.q, call.k, call.v, call.pages, LAYER, call.rows)
