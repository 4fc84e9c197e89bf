"""`python -m jaxvllm.server.api_process`: one of several processes that answer HTTP, started by `api_processes`.

It has no engine: a broker in its parent has them. It ends when its parent ends.
"""

import asyncio
import os
import sys

import msgspec
import zmq

from jaxvllm.config import EngineConfig
from jaxvllm.server.api_processes import ApiStart
from jaxvllm.server.http.handover import Received
from jaxvllm.server.http.http_config import read_keys
from jaxvllm.server.http.http_door import HttpDoor
from jaxvllm.server.lifecycle import StopSignals, drain, until_first
from jaxvllm.server.logs import set_up_logs
from jaxvllm.server.metrics.prometheus import Metrics
from jaxvllm.server.serve import make_http
from jaxvllm.server.service import Service
from jaxvllm.worker import wire
from jaxvllm.worker.async_llm import AsyncLLM
from jaxvllm.worker.engine_process import EngineProcess, open_socket
from jaxvllm.worker.parent import end_with_parent
from jaxvllm.worker.queue_limits import QueueLimits

# How often the parent is told of the answers, which is how old they may be in the metrics that another process shows.
COUNT_SECONDS = 1.0


class Parent:
    """The parent's process, as the process of an engine. Implements `Life`."""

    has_ended_itself = False
    is_out_of_reach = False

    def __init__(self) -> None:
        self._left = asyncio.Event()

    @property
    def pid(self) -> int:
        return os.getppid()

    async def wait(self) -> object:
        """Waits until it is left: when it ends, this process ends, too."""
        return await self._left.wait()

    def kill(self) -> None:
        """Leaves it."""
        self._left.set()

    def end_text(self) -> str:
        return "was left"


class Broker:
    """The place of an API process's engines: behind a socket to its parent. Implements `Place`."""

    def __init__(self, address: str):
        self._address = address

    async def start(self, config: EngineConfig, limits: QueueLimits) -> EngineProcess:
        """Implements `Place.start`. The broker says when there is an engine."""
        channel = open_socket()
        channel.connect(self._address)
        return EngineProcess(Parent(), channel)


class BrokeredLLM(AsyncLLM):
    """The engines behind the broker. It also knows the metrics of all API processes together."""

    _metrics: asyncio.Future[tuple[bytes, str]] | None = None

    def count_http(self, metrics: Metrics) -> None:
        """Tells the broker what this process has answered so far."""
        if self._process is not None:
            self._process.send(metrics.http_counts())

    async def metrics(self, own: Metrics) -> tuple[bytes, str]:
        """Returns the text of the metrics of all processes, and its content type."""
        process = self._process
        if process is None:
            return own.render()
        self.count_http(own)
        if self._metrics is None:
            self._metrics = asyncio.get_running_loop().create_future()
            process.send(wire.ShowMetrics())
        return await asyncio.shield(self._metrics)

    def _repeat(self, process: EngineProcess) -> None:
        """Tells nothing: the broker's engines know what lasts, and this process may know only what was before it."""

    def _read(self, report: wire.Report) -> None:
        if isinstance(report, wire.MetricsText):
            if self._metrics is not None:
                self._metrics.set_result((report.body, report.kind))
                self._metrics = None
            return
        super()._read(report)


async def serve(start: ApiStart) -> int:
    """Answers until a signal. Returns 0 when every request could finish, otherwise 1."""
    with Received(start.connections, start.max_files) as connections, StopSignals() as stop:
        llm = BrokeredLLM.from_config(start.engine, start.limits, start.chat_template, place=Broker(start.address))
        try:
            llm.launch()
            service = Service(llm, start.server, lambda: llm.metrics(service.metrics))
            door = HttpDoor(connections, start.server, read_keys(start.server), start.is_local, start.max_files)
            server = make_http(service, door)

            async def count() -> None:
                while True:
                    await asyncio.sleep(COUNT_SECONDS)
                    llm.count_http(service.metrics)

            async with server.running(connections) as serving:
                try:
                    await until_first(stop.asked(), asyncio.shield(serving), llm.ended(), count())
                    is_clean = await drain(service, stop)
                    llm.count_http(service.metrics)
                finally:
                    await until_first(llm.close(), stop.insisted())
                    if stop.is_urgent:
                        server.hurry()
        finally:
            await llm.close()
    return 0 if is_clean else 1


def main() -> None:
    """Reads what to do from standard input, which the parent keeps open as long as it lives."""
    line = sys.stdin.buffer.readline()
    if not line:  # the parent has ended while this process was starting
        os._exit(1)
    end_with_parent()
    start = msgspec.json.decode(line, type=ApiStart)
    set_up_logs()
    code = 1
    try:
        code = asyncio.run(serve(start))
    finally:
        zmq.Context.instance().destroy(linger=0)
        os._exit(code)


if __name__ == "__main__":
    main()
