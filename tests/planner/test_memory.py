"""Where memory goes: the parts add up, by the rules that the engine fills a device with."""

import pytest

from jaxvllm.planner.memory import Memory
from jaxvllm.runtime.memory import pages_that_fit
from tests.planner.jobs import TINY, job

MIB = 2**20


@pytest.mark.parametrize("step", [0, 300 * MIB])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "page_size": 64}, {"max_num_seqs": 1}])
def test_parts_add_up_and_pages_are_the_engines(step, options):
    planned = job("Llama-3.2-3B", "v5e", **options)
    memory = Memory.of(planned, step, 0.9, 4096)
    assert memory.fits
    assert memory.weights + memory.step + memory.kv + memory.unused == memory.total == planned.target.memory_bytes
    room = int(memory.total * 0.9) - memory.weights - step
    useful = planned.max_num_seqs * planned.max_pages + 1
    assert memory.kv == pages_that_fit(room, planned.page_bytes, useful) * planned.page_bytes
    assert memory.num_tokens == (memory.kv // planned.page_bytes - 1) * planned.page_size
    assert memory.num_requests == memory.num_tokens // 4096


def test_what_is_missing_is_told():
    planned = job("Llama-3.1-8B", "v5e")
    memory = Memory.of(planned, 0, 0.9, 4096)
    assert not memory.fits and memory.num_tokens == memory.kv == 0
    # With this much more there is room for a request and the trash page.
    more = -memory.unused
    page = planned.page_bytes
    assert int(memory.total * 0.9) + more - memory.weights == 257 * page


def test_a_request_that_is_too_long_does_not_fit():
    planned = job("Llama-3.2-3B", "v5e", max_num_seqs=1)
    tokens = Memory.of(planned, 0, 0.9, 4096).num_tokens
    assert Memory.of(planned, 0, 0.9, tokens).fits
    assert Memory.of(planned, 0, 0.9, tokens + 16).unused < 0


def test_virtual_devices_share_what_the_engine_could_take(monkeypatch):
    monkeypatch.setattr("jaxvllm.planner.target._host_bytes_available", lambda: 10**9)
    whole, half = job(TINY, "cpu"), job(TINY, "cpu", mesh="1x2")
    assert (whole.target.memory_bytes, half.target.memory_bytes) == (10**9, 5 * 10**8)
    assert job(TINY, "cpu", mesh="2x2").target.memory_bytes == 10**9 // 4
