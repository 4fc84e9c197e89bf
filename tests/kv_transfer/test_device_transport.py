"""Pages that cross from device to device: whatever the other engine does, a pull ends."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxvllm.kv_transfer.page_format import Page, PageArray, PageFormat, WrongPage
from jaxvllm.kv_transfer.transports import DeviceTransport, TcpTransport
from tests.processes import stop

SHAPES = ((2, 2, 4, 8), (1, 2, 4, 8))
PATIENCE = 60.0
NAMES = [bytes([number]) * 32 for number in range(3)]


def transport() -> DeviceTransport:
    arrays = tuple(PageArray(*shape, np.dtype(jnp.bfloat16)) for shape in SHAPES)
    here = SingleDeviceSharding(jax.devices()[0])
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=here) for shape in SHAPES]
    return DeviceTransport(PageFormat("model", arrays), like, "127.0.0.1")


def page(number: int, *, leaves_window: bool = False) -> Page:
    first, second = (jnp.full(shape, number, jnp.bfloat16) for shape in SHAPES)
    return Page((first, None if leaves_window else second))


def test_pages_are_as_they_were() -> None:
    giver, taker = transport(), transport()
    given = [page(0), page(1, leaves_window=True), page(2)]
    taken = taker.take(giver.give(NAMES[:3], given), NAMES[:3], PATIENCE)
    for one, other in zip(given, taken, strict=True):
        assert [x is None for x in one.arrays] == [x is None for x in other.arrays]
        for x, y in zip(one.arrays, other.arrays, strict=True):
            assert x is None or np.array_equal(x, y)
    assert giver.give([], []) == [] and taker.take([], NAMES, PATIENCE) == []


def test_engines_with_another_transport_are_no_peers() -> None:
    assert transport().fingerprint == transport().fingerprint
    assert transport().fingerprint != TcpTransport(transport()._format).fingerprint


def test_what_tells_of_no_pages_is_refused() -> None:
    giver, taker = transport(), transport()
    [frame] = giver.give(NAMES[:1], [page(0)])
    address, uuid, present, names = msgspec.msgpack.decode(frame)
    for wrong in (
        b"",
        frame[:-1],
        msgspec.msgpack.encode([address, uuid, [[True]], names]),
        msgspec.msgpack.encode([address, -1, present, names]),
        msgspec.msgpack.encode([address, uuid, present * 17, names]),
        msgspec.msgpack.encode([address, uuid, present, NAMES[1:2]]),
        *(msgspec.msgpack.encode([one, uuid, present, names]) for one in ("", "host", "é:1", "a b:1", "h:" + "1" * 99)),
    ):
        with pytest.raises(WrongPage):
            taker.take([wrong], NAMES, PATIENCE)


def test_arrays_that_nobody_gives_are_given_up_and_others_still_come() -> None:
    giver, taker = transport(), transport()
    [frame] = giver.give(NAMES[:1], [page(0)])
    address, uuid, present, names = msgspec.msgpack.decode(frame)
    with pytest.raises(TimeoutError):
        taker.take([msgspec.msgpack.encode([address, uuid ^ 1, present, names])], NAMES, seconds=0.2)
    assert len(taker.take([frame], NAMES, PATIENCE)) == 1
    with pytest.raises(TimeoutError):
        taker.take([frame], NAMES, seconds=0.2)  # an id serves once
    assert len(taker.take(giver.give(NAMES[:1], [page(3)]), NAMES, PATIENCE)) == 1


# It gives two pages, one frame each, and waits.
GIVER = """
    import sys
    from tests.kv_transfer.test_device_transport import NAMES, page, transport
    giver = transport()
    frames = [giver.give(NAMES[:1], [page(number)])[0].hex() for number in range(2)]
    print(*frames, flush=True)
    sys.stdin.read()
"""


def test_an_engine_that_is_stopped_or_dies_is_given_up() -> None:
    command = [sys.executable, "-c", textwrap.dedent(GIVER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as giver:
        try:
            assert giver.stdout is not None
            first, second = map(bytes.fromhex, giver.stdout.readline().split())
            taker = transport()
            [whole] = taker.take([first], NAMES, PATIENCE)
            assert np.array_equal(whole.arrays[0], page(0).arrays[0])
            stop(giver.pid)
            with pytest.raises(TimeoutError):
                taker.take([second], NAMES, seconds=0.2)
            giver.kill()
            giver.wait()
            with pytest.raises((WrongPage, TimeoutError)):
                taker.take([second], NAMES, seconds=0.2)
        finally:
            giver.kill()
