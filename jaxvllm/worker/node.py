"""`run_node`: a headless host, which runs engines for the server of another host and has no server of its own."""

import asyncio
import logging
import signal
import socket as sockets
from contextlib import suppress

import zmq
import zmq.asyncio

from jaxvllm.worker.data_parallel import OneHost, device_kind
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from jaxvllm.worker.engine_link import Address, lost, set_heartbeats
from jaxvllm.worker.engine_process import ChildProcess
from jaxvllm.worker.node_messages import Ended, Join, Kill, Launch, decode_from_server, encode, read_secret, server_keys

logger = logging.getLogger(__name__)

# The pause before a host joins again, whose server is gone.
PAUSE_SECONDS = 1.0


async def run_node(config: DataParallelConfig) -> None:
    """Runs the engines that the server asks for, until SIGTERM or SIGINT. Joins again when the server comes back.

    Raises ValueError when there is no secret or the server's address is unknown.
    """
    secret = read_secret()
    try:
        ip = sockets.gethostbyname(config.data_parallel_address)
    except OSError as error:
        raise ValueError(f"data_parallel_address {config.data_parallel_address} is unknown: {error}") from None
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    stopping = asyncio.ensure_future(stopped.wait())
    first, address = config.data_parallel_start_rank, config.data_parallel_address
    logger.info("engines from %d on for the server at %s port %d", first, address, config.data_parallel_rpc_port)
    while not stopped.is_set():
        serving = asyncio.ensure_future(Node(config, f"tcp://{ip}:{config.data_parallel_rpc_port}", secret).run())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        await asyncio.wait((stopping,), timeout=PAUSE_SECONDS)


class Node:
    """The engines of this host while its connection to the server lasts."""

    def __init__(self, config: DataParallelConfig, url: str, secret: str):
        self._config = config
        self._url = url
        self._children: dict[int, ChildProcess] = {}  # by the number of their start
        self._watching: set[asyncio.Task[None]] = set()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        key, private = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_keys(secret)[0])
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.setsockopt(zmq.LINGER, 0)
        set_heartbeats(self._socket)

    async def run(self) -> None:
        """Does what the server asks, until the connection to it is lost. Then all engines are ended."""
        losing = asyncio.ensure_future(lost(self._socket))
        try:
            self._socket.connect(self._url)
            assert self._config.data_parallel_size_local is not None
            await self._tell(Join(self._config.data_parallel_start_rank, self._config.data_parallel_size_local))
            while not losing.done():
                hearing = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait((hearing, losing), return_when=asyncio.FIRST_COMPLETED)
                if not hearing.done():
                    hearing.cancel()
                    break
                await self._obey(decode_from_server(hearing.result()))
            logger.warning("the connection to the server is lost, or it has another secret: its engines end")
        finally:
            losing.cancel()
            await asyncio.gather(losing, return_exceptions=True)
            for child in self._children.values():
                child.kill()
            await asyncio.gather(*self._watching, return_exceptions=True)
            self._socket.close()

    async def _obey(self, message: Launch | Kill) -> None:
        match message:
            case Kill(start):
                if start in self._children:
                    self._children[start].kill()
            case Launch(start, rank, model, url, key):
                assert self._config.data_parallel_size_local is not None
                places = OneHost(self._config.data_parallel_size_local, model, device_kind())
                local = rank - self._config.data_parallel_start_rank
                try:
                    environment = {**places.place(local).environment, **Address(url, key).environment()}
                    child = self._children[start] = await ChildProcess.start(url, environment)
                except (OSError, ValueError) as error:
                    await self._tell(Ended(start, f"could not be started: {error}", False))
                    return
                logger.info("engine %d is started", rank)
                task = asyncio.create_task(self._watch(start, rank, child))
                self._watching.add(task)
                task.add_done_callback(self._watching.discard)

    async def _watch(self, start: int, rank: int, child: ChildProcess) -> None:
        await child.wait()
        del self._children[start]
        logger.info("engine %d %s", rank, child.end_text())
        await self._tell(Ended(start, child.end_text(), not child.has_ended_itself))

    async def _tell(self, message: Join | Ended) -> None:
        await self._socket.send(encode(message))
