"""`NodePlaces`: the first engines of a pool run on this host, and the others on headless hosts that join."""

import asyncio
import logging
import socket as sockets
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from jaxvllm.config import EngineConfig
from jaxvllm.worker import wire
from jaxvllm.worker.engine_link import listen, lost, set_heartbeats
from jaxvllm.worker.engine_pool import Places
from jaxvllm.worker.engine_process import EngineProcess, Place
from jaxvllm.worker.node_messages import Ended, Join, Kill, Launch, decode_from_host, encode, server_keys
from jaxvllm.worker.queue_limits import QueueLimits

logger = logging.getLogger(__name__)


class NodePlaces(Places):
    """Engines are on this host, or wherever a headless host has joined that has their number."""

    def __init__(self, local: Places, num_local: int, model: int, door: "NodeDoor"):
        """Puts the first `num_local` engines at the places of `local`. Each engine has `model` devices."""
        self._local = local
        self._num_local = num_local
        self._model = model
        self._door = door

    def place(self, rank: int) -> Place:
        """Implements `Places.place`."""
        return self._local.place(rank) if rank < self._num_local else NodePlace(self._door, rank, self._model)

    async def close(self) -> None:
        """Implements `Places.close`."""
        await self._door.close()


class NodePlace:
    """Runs an engine on the headless host that has its number. Implements `Place`."""

    def __init__(self, door: "NodeDoor", rank: int, model: int):
        self._door = door
        self._rank = rank
        self._model = model

    async def start(self, config: EngineConfig, limits: QueueLimits) -> EngineProcess:
        """Implements `Place.start`. Waits until there is such a host."""
        socket, address = listen(self._door.ip)
        try:
            life = await self._door.launch(self._rank, self._model, address.url, address.key)
        except BaseException:
            socket.close()
            raise
        life.watch(socket)
        engine = EngineProcess(life, socket)
        engine.send(wire.Start(config, limits))
        return engine


class NodeDoor:
    """The socket where headless hosts join."""

    def __init__(self, address: str, port: int, secret: str):
        """Raises OSError when it cannot listen there."""
        self.ip = sockets.gethostbyname(address)
        self._hosts: dict[bytes, Join] = {}  # by the name of their connection
        self._joined = asyncio.Condition()
        self._starts = count()
        self._lives: dict[int, RemoteLife] = {}
        self._reading: asyncio.Task[None] | None = None
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        public, private = server_keys(secret)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a host that has left is noticed
        set_heartbeats(self._socket)
        try:
            self._socket.bind(f"tcp://{self.ip}:{port}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(f"headless hosts cannot join at {self.ip}:{port}: {error}") from error

    async def launch(self, rank: int, model: int, url: str, key: bytes) -> "RemoteLife":
        """Has the process of engine `rank` started, as soon as a host has joined that has this number."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        if self._name_of(rank) is None:
            logger.info("engine %d waits for a headless host that has its number", rank)
        while True:
            async with self._joined:
                await self._joined.wait_for(lambda: self._name_of(rank) is not None)
                name = self._name_of(rank)
            assert name is not None
            start = next(self._starts)
            life = self._lives[start] = RemoteLife(self, name, start, rank)
            if await self._send(name, Launch(start, rank, model, url, key)):
                return life
            self.forget(start)

    async def kill(self, name: bytes, start: int) -> None:
        """Has the process of this start killed, if its host is still there."""
        await self._send(name, Kill(start))

    def forget(self, start: int) -> None:
        """Takes note that the process of this start has ended."""
        self._lives.pop(start, None)

    async def close(self) -> None:
        """Lets no more hosts join. Their engines end when their connections do."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()

    def _name_of(self, rank: int) -> bytes | None:
        """Returns the connection of the host with this number. It is the last to join, as an earlier one is gone."""
        names = [name for name, host in self._hosts.items() if host.start_rank <= rank < host.start_rank + host.size]
        return names[-1] if names else None

    async def _send(self, name: bytes, message: Launch | Kill) -> bool:
        try:
            await self._socket.send_multipart((name, encode(message)))
        except zmq.ZMQError:
            self._hosts.pop(name, None)
            return False
        return True

    async def _read(self) -> None:
        while True:
            name, *frames = await self._socket.recv_multipart()
            try:
                message = decode_from_host(b"".join(frames))
            except msgspec.DecodeError as error:
                logger.warning("a message of a headless host cannot be read (is it of the same version?): %s", error)
                continue
            match message:
                case Join(start_rank, size):
                    logger.info("a headless host has joined, for engines %d to %d", start_rank, start_rank + size - 1)
                    async with self._joined:
                        self._hosts[name] = message
                        self._joined.notify_all()
                case Ended(start, text, was_killed):
                    if start in self._lives:
                        self._lives[start].end(text, was_killed)


class RemoteLife:
    """The process of an engine on a headless host. Implements `Life`."""

    def __init__(self, door: NodeDoor, name: bytes, start: int, rank: int):
        self.has_ended_itself = False
        self.is_out_of_reach = False
        self._door = door
        self._name = name
        self._start = start
        self._rank = rank
        self._ended = asyncio.Event()
        self._text = "is running"
        self._is_killed = False
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def pid(self) -> int:
        """The number of the engine: the id of a process on another host says nothing here."""
        return self._rank

    def watch(self, socket: zmq.asyncio.Socket) -> None:
        """Takes the socket of the engine. The loss of its connection is the engine's end."""
        self._socket = socket

    def end(self, text: str, was_killed: bool) -> None:
        """Takes note of the end of the process, as its host tells it."""
        self._text, self.has_ended_itself = text, not was_killed
        self._ended.set()

    async def wait(self) -> object:
        """Implements `Life.wait`."""
        assert self._socket is not None
        disconnected = asyncio.ensure_future(lost(self._socket))
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((disconnected, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():  # its host may say soon why
            await asyncio.wait((ended,), timeout=1)
        if not ended.done():
            self._text = "is out of reach"
            self.is_out_of_reach = True
        for task in (disconnected, ended):
            task.cancel()
        await asyncio.gather(disconnected, ended, return_exceptions=True)
        self._door.forget(self._start)
        await self._door.kill(self._name, self._start)
        return None

    def kill(self) -> None:
        """Implements `Life.kill`."""
        if not self._is_killed:
            self._is_killed = True
            self._text = "was ended"
            self._ended.set()

    def end_text(self) -> str:
        """Implements `Life.end_text`."""
        return f"of the headless host with number {self._rank} {self._text}"
