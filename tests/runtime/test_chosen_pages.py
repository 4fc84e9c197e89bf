"""Pages that a user chose, and no device has room for."""

from types import SimpleNamespace

import pytest

from jaxvllm.runtime import memory
from jaxvllm.runtime.memory import check_chosen_pages

GIB = 2**30


def device(platform, limit, used):
    return SimpleNamespace(
        platform=platform, memory_stats=lambda: {"bytes_limit": limit * GIB, "bytes_in_use": used * GIB}
    )


def test_the_fullest_device_of_a_mesh_decides():
    devices = [device("tpu", 16, 4), device("tpu", 16, 6)]
    check_chosen_pages(10, 10 * GIB, devices)
    with pytest.raises(ValueError, match=r"num_pages 11 needs 11\.0 GiB on each device, and 10\.0 GiB are free: give"):
        check_chosen_pages(11, 11 * GIB, devices)


def test_virtual_devices_share_the_memory_of_their_host(monkeypatch):
    # More than the 4 GiB that the engine takes there by itself: the user has chosen.
    monkeypatch.setattr(memory, "_host_bytes_available", lambda: 40 * GIB)
    devices = [SimpleNamespace(platform="cpu")] * 4
    check_chosen_pages(10, 10 * GIB, devices)
    with pytest.raises(ValueError, match=r"num_pages 1,?100 needs 1,100\.0 GiB on each device, and 10\.0 GiB are free"):
        check_chosen_pages(1100, 1100 * GIB, devices)
