"""Runs the whole server: it opens the socket, starts the engine, serves, and shuts down after a signal."""

import asyncio
import logging
import socket
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from os import cpu_count
from typing import TYPE_CHECKING, Any, Protocol

from jaxvllm.config import EngineConfig
from jaxvllm.engine.commands import LoadAdapter
from jaxvllm.model_name import local_directory
from jaxvllm.server.adapter_names import read_modules
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_door import HttpDoor
from jaxvllm.server.lifecycle import StopSignals, drain, until_first
from jaxvllm.text.chat_template import read_chat_template
from jaxvllm.worker.data_parallel import open_pool
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from jaxvllm.worker.engine_client import EngineClient, FollowedError
from jaxvllm.worker.queue_limits import QueueLimits

if TYPE_CHECKING:
    from jaxvllm.server.http.http_server import HttpServer
    from jaxvllm.server.service import Service

logger = logging.getLogger(__name__)

# The events a second that all streams share, for each core and at most, unless the user sets a number. An event costs
# this process 60 us, half of them in the kernel, and on a CPU the engine waits for that core. At 750 a core, 64 streams
# on two cores cost the engine 17% of its tokens; at 500 each stream still moves 15 times a second.
OUTPUTS_PER_CORE, MOST_OUTPUTS = 500, 5000


async def serve(engine: EngineConfig, config: ServerConfig, parallel: DataParallelConfig) -> int:
    """Serves until a signal, ends all its processes, and returns the exit code.

    After SIGTERM and SIGHUP the code is 0 when every request could finish, otherwise 1; after SIGINT it is 130. Raises
    ValueError when an option is wrong, OSError when it cannot listen on the address, and RuntimeError when the engine
    cannot be built. When the environment says that this process is one of several and not process 0, it computes for
    process 0, never becomes ready, and returns 0 when process 0 has ended.
    """
    start = time.monotonic()
    if config.enable_elastic_ep and parallel.shares_experts(engine):
        raise ValueError(
            "enable_elastic_ep changes the number of replicas, and replicas that share experts are one program: give "
            "data_parallel_backend mp, with which each replica has all experts, or leave enable_elastic_ep out"
        )
    local_directory(engine.model)  # what is wrong with it is told before anybody may think that the server works
    chat_template = None if config.chat_template is None else read_chat_template(config.chat_template)
    with HttpDoor.opened(config) as door, StopSignals() as stop:
        logger.info("listening on %s: /ready tells when model %s is loaded", door.url, engine.model)
        if engine.max_outputs_per_second is None:
            engine = replace(engine, max_outputs_per_second=min(OUTPUTS_PER_CORE * (cpu_count() or 1), MOST_OUTPUTS))
        limits = QueueLimits(config.max_num_queued_requests, config.max_num_queued_tokens)
        llm = open_pool(engine, parallel, limits, chat_template)
        try:
            llm.launch()
            await asyncio.sleep(0)  # starts the engine's process, which imports JAX while this one imports FastAPI
            front = _front(llm, config, door, limits, chat_template)
            async with front.running() as serving:
                try:
                    await until_first(llm.ready(), stop.asked())
                    if stop.first is None:
                        # The numbers are those that `AdapterNames` gives them.
                        for number, (name, path) in enumerate(read_modules(config.lora_modules), 1):
                            await llm.ask(LoadAdapter(name, number, path))
                        logger.info("ready after %.1f s: %s", time.monotonic() - start, door.url)
                        await until_first(stop.asked(), asyncio.shield(serving), llm.ended())
                    is_clean = await front.drain(stop)
                except FollowedError:
                    return 0
                finally:
                    # The remaining requests end with an error, which is still sent.
                    await until_first(llm.close(), stop.insisted())
                    if stop.is_urgent:
                        front.hurry()
        finally:
            await llm.close()
    return stop.exit_code(is_clean)


class Front(Protocol):
    """The application that answers HTTP before the engines."""

    def running(self) -> AbstractAsyncContextManager["asyncio.Future[Any]"]:
        """Answers inside the context. The future ends, with an error, if that cannot go on."""

    async def drain(self, stop: StopSignals) -> bool:
        """Takes no new requests and lets the running ones finish. Returns whether all of them did."""

    def hurry(self) -> None:
        """Ends every connection now, even while an answer is being sent."""


@dataclass(frozen=True)
class OwnFront:
    """This process answers itself."""

    service: "Service"
    server: "HttpServer"
    listener: socket.socket

    def running(self) -> AbstractAsyncContextManager["asyncio.Future[Any]"]:
        """Implements `Front.running`."""
        return self.server.running(self.listener)

    async def drain(self, stop: StopSignals) -> bool:
        """Implements `Front.drain`."""
        return await drain(self.service, stop)

    def hurry(self) -> None:
        """Implements `Front.hurry`."""
        self.server.hurry()


def _front(
    llm: EngineClient,
    config: ServerConfig,
    door: HttpDoor,
    limits: QueueLimits,
    chat_template: str | None,
) -> Front:
    # These imports take 0.8 s. Here they happen while the engine starts.
    from jaxvllm.server.metrics.log_line import StatsLogger
    from jaxvllm.server.service import Service

    llm.observe(StatsLogger(config.log_stats_interval))
    # It observes the engines, also where others answer for it.
    service = Service(llm, config)
    if config.api_server_count == 1:
        return OwnFront(service, make_http(service, door), door.listener)
    from jaxvllm.server.api_processes import ApiProcesses

    return ApiProcesses(llm, config, limits, chat_template, door, service.metrics)


def make_http(service: "Service", door: HttpDoor) -> "HttpServer":
    """Returns the HTTP server of a service at a door. Refusals by the guards count as answers, too."""
    from jaxvllm.server.app import create_app
    from jaxvllm.server.metrics.counting import Counting

    app = create_app(service)
    return door.server(app, around=lambda guarded: Counting(guarded, service.metrics, app.routes))
