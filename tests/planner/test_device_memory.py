"""Where memory goes: the parts add up, by the rules that the engine fills a device with."""

import pytest

from jaxvllm.planner.device_memory import Memory
from jaxvllm.runtime.memory import pages_that_fit
from jaxvllm.runtime.state import state_bytes
from tests.planner.deployments import TINY, deployment

MIB = 2**20


@pytest.mark.parametrize("step", [0, 300 * MIB])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "page_size": 64}, {"max_num_seqs": 1}])
def test_parts_add_up_and_pages_are_the_engines(step, options):
    planned = deployment("Llama-3.2-3B", "v5e", **options)
    memory = Memory.of(planned, step, 0.9, 4096)
    assert memory.fits
    parts = memory.weights + memory.state + memory.step + memory.kv + memory.unused
    assert parts == memory.total == planned.target.memory_bytes
    assert memory.state == state_bytes(planned.cache_shape(1).sizes(planned.spec)) > 0
    room = int(memory.total * 0.9) - memory.weights - memory.state - step
    useful = planned.max_num_seqs * planned.max_pages + 1
    assert memory.kv == pages_that_fit(room, planned.pool_bytes, useful) * planned.page_bytes
    assert memory.num_tokens == (memory.kv // planned.page_bytes - 1) * planned.page_size
    assert memory.num_requests == memory.num_tokens // 4096


def test_what_is_missing_is_told():
    planned = deployment("Llama-3.1-8B", "v5e")
    memory = Memory.of(planned, 0, 0.9, 4096)
    assert not memory.fits and memory.num_tokens == memory.kv == 0
    # With this much more there is room for a request and the trash page.
    more = -memory.unused
    page = planned.page_bytes
    assert int(memory.total * 0.9) + more - memory.weights - memory.state == 257 * page


def test_a_request_that_is_too_long_does_not_fit():
    planned = deployment("Llama-3.2-3B", "v5e", max_num_seqs=1)
    tokens = Memory.of(planned, 0, 0.9, 4096).num_tokens
    assert Memory.of(planned, 0, 0.9, tokens).fits
    assert Memory.of(planned, 0, 0.9, tokens + 16).unused < 0


def test_virtual_devices_share_what_the_engine_could_take(monkeypatch):
    monkeypatch.setattr("jaxvllm.planner.target._host_bytes_available", lambda: 10**9)
    whole, half = deployment(TINY, "cpu"), deployment(TINY, "cpu", mesh="1x2")
    assert (whole.target.memory_bytes, half.target.memory_bytes) == (10**9, 5 * 10**8)
    assert deployment(TINY, "cpu", mesh="2x2").target.memory_bytes == 10**9 // 4


def test_gemma_27b_at_32k_holds_several_times_more_where_windows_free_their_pages():
    planned = deployment("gemma-3-27b", "h200", dtype="bfloat16", max_model_len=32768)
    memory = Memory.of(planned, 0, 0.9, 32768)
    # As it was with the same memory: all 62 layers in one group, whose pages hold every position.
    pages = (int(memory.total * 0.9) - memory.weights) // planned.page_bytes
    before = (pages - 1) * planned.page_size
    assert (before, before // 32768) == (161_888, 4)
    assert (memory.num_tokens, memory.num_requests) == (581_408, 17)
    # Requests as long as the window are half as many, and from 3 times the window on they are more than before.
    shape = planned.cache_shape(1 + memory.num_tokens // planned.page_size)
    assert [(before // length, shape.num_requests(planned.spec, length)) for length in (1024, 3072, 8192)] == [
        (158, 78),
        (52, 77),
        (19, 70),
    ]
