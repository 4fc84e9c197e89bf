"""The connection between hosts: who has no key is not heard, and its end is noticed by both sides."""

import asyncio
import subprocess
import sys

import pytest
import zmq

from jaxvllm.worker import engine_link
from jaxvllm.worker.engine_link import Address, connect, listen, lost
from tests.waiting import PATIENCE

ENGINE = """
import sys, time, zmq
from jaxvllm.worker.engine_link import Address, connect
socket = zmq.Context().socket(zmq.PAIR)
connect(socket, Address(sys.argv[1], sys.argv[2].encode()))
socket.send(socket.recv())
time.sleep(3600)
"""


def start(address: Address) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", ENGINE, address.url, address.key.decode()])


@pytest.mark.parametrize("ends_first", ["engine", "client"])
def test_the_end_of_either_side_is_noticed_by_the_other(ends_first: str) -> None:
    async def run() -> None:
        socket, address = listen("127.0.0.1")
        with start(address) as engine:
            try:
                async with asyncio.timeout(PATIENCE):
                    loss = asyncio.create_task(lost(socket))
                    await socket.send(b"are you there?")
                    assert await socket.recv() == b"are you there?"
                    assert not loss.done()
                    if ends_first == "engine":
                        engine.kill()
                        await loss
                    loss.cancel()
                    await asyncio.gather(loss, return_exceptions=True)
                    socket.close()
                    if ends_first == "client":
                        engine.wait()
            finally:
                engine.kill()

    asyncio.run(run())


def test_without_the_key_nobody_is_heard() -> None:
    async def run() -> None:
        socket, address = listen("127.0.0.1")
        another, _ = zmq.curve_keypair()
        with zmq.Context() as context:
            strangers = [context.socket(zmq.PAIR) for _ in range(2)]
            for stranger, key in zip(strangers, (None, another), strict=True):
                stranger.setsockopt(zmq.LINGER, 0)
                if key is not None:
                    mine, secret = zmq.curve_keypair()
                    stranger.setsockopt(zmq.CURVE_SERVERKEY, key)
                    stranger.setsockopt(zmq.CURVE_PUBLICKEY, mine)
                    stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
                stranger.connect(address.url)
                stranger.send(b"a wrong engine", zmq.NOBLOCK)
            with start(address) as engine:  # the right one is heard, and first
                await socket.send(b"are you there?")
                assert await asyncio.wait_for(socket.recv(), PATIENCE) == b"are you there?"
                engine.kill()
            context.destroy(linger=0)
        socket.close()

    asyncio.run(run())


def test_a_client_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "CONNECT_MILLISECONDS", 50)
    key, _ = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PAIR) as stray, context.socket(zmq.PAIR) as engine:
        port = stray.bind_to_random_port("tcp://127.0.0.1")  # it is no client, and never answers the greeting
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} cannot be reached from this host"):
            connect(engine, Address(f"tcp://127.0.0.1:{port}", key))


def test_the_key_is_in_no_command_line_and_not_left_in_the_environment() -> None:
    address = Address("tcp://127.0.0.1:1", b"some key")
    environment = {"PATH": "/bin", **address.environment()}
    assert Address.read(address.url, environment) == address
    assert environment == {"PATH": "/bin"}
    assert Address.read("ipc:///tmp/engine", environment) == "ipc:///tmp/engine"
