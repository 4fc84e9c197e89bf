"""Several processes answer the connections of one address: each gets its turn, and none is lost for lack of one."""

import asyncio
import os
import socket
from contextlib import ExitStack, asynccontextmanager

import pytest

from jaxvllm.server.http import handover
from jaxvllm.server.http.handover import Handover, Received
from jaxvllm.server.http.listener import SPARE_FILES, listen
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(handover, "LOOK_SECONDS", 0.01)


class Stoppable(Received):
    """Where a process receives connections that may be stopped: then it takes nothing and says nothing."""

    is_stopped = False

    def accept(self):
        if self.is_stopped:
            raise BlockingIOError
        return super().accept()


class Server:
    """What a process does with connections: it answers each with its name."""

    def __init__(self, name, handover, stack):
        self.name, self.handover, self._stack, self._server = name, handover, stack, None
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        self.received = stack.enter_context(Stoppable(theirs.dup().detach(), max_files=65536))
        self.serving = asyncio.create_task(handover.serve(name.decode(), ours, stack.enter_context(theirs)))

    async def start(self):
        server = self

        class Answer(asyncio.Protocol):
            def connection_made(self, transport):
                assert transport.get_extra_info("peername")[0] == "127.0.0.1"
                transport.write(server.name)
                server._stack.callback(transport.abort)

        self._server = await asyncio.get_running_loop().create_server(Answer, sock=self.received)
        await asyncio.sleep(0.01)

    async def die(self):
        self._server.close()
        self.received.close()
        await asyncio.sleep(0.01)

    async def end(self):
        """What its parent does when it has noticed its end."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


@asynccontextmanager
async def servers(*names):
    """The stack of what is open, a listening socket, and servers that its connections are handed over to."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        handover = Handover(listener)
        started = [Server(name, handover, stack) for name in names]
        yield stack, listener, *started
        for one in started:
            await one.end()
        handover.close()


def connected(listener, stack, count):
    return [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(count)]


async def answer(client):
    client.setblocking(False)
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 9), timeout=60)


def test_processes_have_their_turns():
    async def run():
        async with servers(b"1", b"2", b"3", b"4") as (stack, listener, first, second, third, fourth):
            early = connected(listener, stack, 2)
            await second.start()  # takes those who came before any was ready
            assert [await answer(one) for one in early] == [b"2"] * 2
            await first.start()
            both = [await answer(one) for one in connected(listener, stack, 50)]
            assert both.count(b"1") == both.count(b"2") == 25

            # One dies, and another one before it was ready: the last one gets all, and a new one a half again.
            await second.die()
            third.received.close()
            assert [await answer(one) for one in connected(listener, stack, 5)] == [b"1"] * 5
            await second.end()
            await fourth.start()
            both = [await answer(one) for one in connected(listener, stack, 10)]
            assert both.count(b"1") == both.count(b"4") == 5

    asyncio.run(run())


def test_connections_wait_while_no_process_takes_them():
    async def run():
        async with servers(b"1") as (stack, listener, stuck):
            stuck.received.listen()  # it is ready, and then takes none
            clients = connected(listener, stack, 400)
            await until(lambda: stuck.handover._waiting)  # which had been on the way to it
            await stuck.start()
            assert {await answer(one) for one in clients} == {b"1"}

    asyncio.run(run())


def test_a_connection_that_no_process_took_is_not_forgotten():
    """The only process dies before the connection reaches it, nobody else connects, and another process starts."""

    async def run():
        async with servers(b"1", b"2") as (stack, listener, dead, alive):
            await dead.start()
            await dead.die()
            [client] = connected(listener, stack, 1)
            await until(lambda: dead.handover._recipients[0]._num_unanswered or dead.handover._waiting)
            await dead.end()
            await alive.start()
            assert await answer(client) == b"2"

    asyncio.run(run())


def test_only_processes_that_answer_get_connections():
    """What a process did not take before it was stopped is answered by another, and only once."""

    async def run():
        async with servers(b"1", b"2", b"3") as (stack, listener, first, second, third):
            for one in (first, second, third):
                await one.start()
            second.received.is_stopped = True
            clients = connected(listener, stack, 31)
            said = [await answer(one) for one in clients]
            assert said.count(b"1") + said.count(b"3") == 31
            assert abs(said.count(b"1") - said.count(b"3")) <= 11, "what it left is dealt out, too"

            for one in (first, third):
                one.received.is_stopped = True
            late = connected(listener, stack, 5)
            await until(lambda: len(first.handover._waiting) == 5 or not any_answers(first.handover))
            second.received.is_stopped = False  # it finds nothing of what it has missed
            assert [await answer(one) for one in late] == [b"2"] * 5

            for one in (first, third):
                one.received.is_stopped = False
            await until(lambda: all(one.may_take for one in first.handover._recipients))
            again = connected(listener, stack, 30)
            said = [await answer(one) for one in again]
            assert [said.count(name) for name in (b"1", b"2", b"3")] == [10, 10, 10]
            for one in (*clients, *late, *again):
                with pytest.raises(BlockingIOError):
                    one.recv(9)

    asyncio.run(run())


def any_answers(handover):
    return any(not one.is_silent for one in handover._recipients)


def test_a_process_that_never_answers_again_is_given_up(monkeypatch):
    monkeypatch.setattr(handover, "STUCK_LOOKS", 20)

    async def run():
        async with servers(b"1", b"2") as (stack, listener, first, second):
            await first.start()
            second.received.listen()
            await asyncio.wait_for(asyncio.shield(second.serving), timeout=60)
            assert not first.serving.done()
            assert [await answer(one) for one in connected(listener, stack, 4)] == [b"1"] * 4

    asyncio.run(run())


def test_what_a_process_cannot_take():
    """A client that left, and a process without a file for another connection: asyncio is told to try again."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        theirs.setblocking(False)
        received = stack.enter_context(Received(theirs.detach(), max_files=65536))
        with pytest.raises(BlockingIOError):
            received.accept()

        def hand_over():
            [client] = connected(listener, stack, 1)
            listener.setblocking(True)
            with listener.accept()[0] as connection:
                socket.send_fds(ours, [b"\0"], [connection.fileno()])
            return client

        left = hand_over()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        left.close()  # with a reset
        with pytest.raises(BlockingIOError):
            received.accept()
        hand_over()
        stack.enter_context(received.accept()[0])

        highest = max(map(int, os.listdir("/dev/fd")))
        received._max_files = highest + SPARE_FILES
        while stack.enter_context(open("/dev/null", "rb")).fileno() <= highest:
            pass  # numbers that other tests have left free between others
        hand_over()
        with pytest.raises(BlockingIOError):
            received.accept()
