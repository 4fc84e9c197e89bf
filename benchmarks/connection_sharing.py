"""Measures three ways in which several processes share the connections of one port, while one of them is stopped.

Each of three processes answers a connection with its number. Fifty clients connect at once, each with a connection that
it keeps, and are counted by who answered them. Then one process is stopped (SIGSTOP), and fifty other clients connect:
how many are not answered within 5 s? The ways are: each process has a socket of its own (SO_REUSEPORT); all accept from
the same socket; one process accepts and hands connections over (`jaxvllm.server.http.handover`). This prints the counts
of each round and writes benchmarks/results/connection-sharing-DATE-COMMIT.json.

    python -m benchmarks.connection_sharing [--rounds 5]
"""

import argparse
import asyncio
import os
import platform
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.server.http.handover import Handover, Received

WAYS = ("SO_REUSEPORT", "one socket", "handed over")
PROCESSES, CLIENTS, PATIENCE = 3, 50, 5.0


async def answer(way: str, file: int, name: str) -> None:
    """Answers connections with `name`, in a process of its own, until it is killed."""
    listener = Received(file, 65536) if way == "handed over" else socket.socket(fileno=file)

    class Name(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(name.encode())

    server = await asyncio.get_running_loop().create_server(Name, sock=listener)
    print("ready", flush=True)
    await server.serve_forever()


def listening(port: int = 0) -> socket.socket:
    """Returns a socket that listens on `port`, which others may do, too."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(2048)
    listener.setblocking(False)
    return listener


@asynccontextmanager
async def processes(way: str) -> AsyncIterator[tuple[int, list[int]]]:
    """Yields the port at which processes answer, and their ids."""
    with ExitStack() as stack:
        first = stack.enter_context(listening())
        port = first.getsockname()[1]
        handover = Handover(first)
        started, serving = [], []
        for number in range(PROCESSES):
            given = first
            if way == "SO_REUSEPORT" and number:
                given = stack.enter_context(listening(port))
            elif way == "handed over":
                ours, given = map(stack.enter_context, socket.socketpair())
                serving.append(asyncio.create_task(handover.serve(str(number), ours, given)))
            command = (sys.executable, "-m", "benchmarks.connection_sharing", "--answer", way, str(given.fileno()))
            process = await asyncio.create_subprocess_exec(
                *command, str(number), pass_fds=(given.fileno(),), stdout=asyncio.subprocess.PIPE, cwd=ROOT
            )
            started.append(process)
            assert process.stdout is not None
            await process.stdout.readline()
        try:
            yield port, [process.pid for process in started]
        finally:
            for process in started:
                process.kill()
                await process.wait()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            handover.close()


async def answers(port: int) -> Counter[str]:
    """Connects all clients at once. Returns how many were answered by each process, and by none."""

    async def one() -> tuple[str, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(PATIENCE):
                return (await reader.read(1)).decode(), writer
        except TimeoutError:
            return "none", writer

    found = await asyncio.gather(*(one() for _ in range(CLIENTS)))
    for _, writer in found:
        writer.transport.abort()
    return Counter(name for name, _ in found)


async def measure(way: str) -> dict[str, list[int]]:
    """Returns a round: connections by process, and those that were not answered while one was stopped."""
    async with processes(way) as (port, pids):
        shares = await answers(port)
        os.kill(pids[1], signal.SIGSTOP)
        while Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.01)
        lost = (await answers(port))["none"]
    return {"shares": [shares[str(number)] for number in range(PROCESSES)], "unanswered": [lost]}


def main() -> None:
    """Measures all ways and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        way, file, name = args.answer
        asyncio.run(answer(way, int(file), name))
        return
    device = machine()
    rounds: dict[str, list[dict[str, list[int]]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            rounds[way].append(asyncio.run(measure(way)))
            print(way, rounds[way][-1], flush=True)
    record = {"processes": PROCESSES, "clients": CLIENTS, "seconds": PATIENCE, "rounds": rounds}
    record |= {"versions": {"python": platform.python_version(), "kernel": platform.release()}}
    print(f"written to {write_record('connection-sharing', device, record).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
