"""The whole server: its socket, its engine, and what happens from the first signal to the last."""

import asyncio
import logging
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from os import cpu_count
from typing import TYPE_CHECKING

from jaxvllm.config import EngineConfig
from jaxvllm.engine.admission import QueueLimits
from jaxvllm.engine.async_llm import AsyncLLM, FollowedError
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.keys import read_keys
from jaxvllm.server.lifecycle import StopSignals, drain, until_first
from jaxvllm.server.listener import RESERVED_FILES, is_open_to_strangers, listen, raise_file_limit, url_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from jaxvllm.server.http_server import HttpServer
    from jaxvllm.server.service import Service

logger = logging.getLogger(__name__)

# Streams share so many events a second, unless the user says how many: one costs this process 60 us, half of them the
# kernel's, and on a CPU the engine waits for that core. 64 streams on two cores cost 17% of its tokens at 750 a core,
# and at 500 each of them still moves 15 times a second.
OUTPUTS_PER_CORE, MOST_OUTPUTS = 500, 5000


async def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Serves until a signal, and returns the exit code; no process is left then.

    SIGTERM and SIGHUP: 0 when every request could finish, otherwise 1; SIGINT: 130. ValueError when an option is
    wrong, OSError when the address cannot be listened on, RuntimeError when the engine cannot be built.
    Where the environment says that this process is not the first of several, it computes for that one, never gets
    ready, and returns 0 when that one has ended.
    """
    start = time.monotonic()
    keys = read_keys(config)
    max_files = raise_file_limit()
    with listen(config.host, config.port, max_files) as listener, StopSignals() as stop:
        url = url_of(listener, config)
        if not keys and is_open_to_strangers(listener):
            logger.warning("whoever reaches %s may use this server: it has no --api-key", url)
        logger.info("listening on %s: /ready tells when model %s is loaded", url, engine.model)
        if engine.max_outputs_per_second is None:
            engine = replace(engine, max_outputs_per_second=min(OUTPUTS_PER_CORE * (cpu_count() or 1), MOST_OUTPUTS))
        llm = AsyncLLM.from_config(engine, QueueLimits(config.max_num_queued_requests, config.max_num_queued_tokens))
        try:
            llm.launch()
            await asyncio.sleep(0)  # the engine's process starts, and imports JAX while this one imports FastAPI
            service, server = _http(llm, config, keys, not is_open_to_strangers(listener), max_files)
            async with server.running(listener) as serving:
                try:
                    await until_first(llm.ready(), stop.asked())
                    if stop.first is None:
                        logger.info("ready after %.1f s: %s", time.monotonic() - start, url)
                        await until_first(stop.asked(), asyncio.shield(serving), llm.ended())
                    is_clean = await drain(service, stop)
                except FollowedError:
                    return 0
                finally:
                    # Requests that are left end with an error, which is still sent.
                    await until_first(llm.close(), stop.insisted())
                    if stop.is_urgent:
                        server.hurry()
        finally:
            await llm.close()
    if stop.first is signal.SIGINT:
        return 128 + signal.SIGINT
    return 0 if is_clean else 1


def guarded(app: "ASGIApp", config: ServerConfig, keys: Iterable[str], is_local: bool = False) -> "ASGIApp":
    """`app` behind its guards: whoever has no key cannot make the server read a body.

    Without keys, a server that `is_local` (no other machine reaches it) answers only to its own names.
    """
    from jaxvllm.server.auth import Auth
    from jaxvllm.server.host_guard import HostGuard
    from jaxvllm.server.limits import RequestLimits, StrictHead
    from jaxvllm.server.request_id import RequestIds

    app = Auth(RequestLimits(app, config.max_body_bytes), keys, config.open_metrics)
    if not keys and is_local and "*" not in config.allowed_host:
        app = HostGuard(app, (config.host, *config.allowed_host))
    return RequestIds(StrictHead(app))


def _http(
    llm: AsyncLLM, config: ServerConfig, keys: Iterable[str], is_local: bool, max_files: int
) -> "tuple[Service, HttpServer]":
    # Imported here: it takes 0.8 s, while the engine starts.
    from jaxvllm.server.app import create_app
    from jaxvllm.server.connection import ConnectionLimits
    from jaxvllm.server.counting import Counting
    from jaxvllm.server.http_server import HttpServer
    from jaxvllm.server.log_line import StatsLogger
    from jaxvllm.server.service import Service

    llm.observe(StatsLogger(config.log_stats_interval))
    service = Service(llm, config)
    app = create_app(service)
    counted = Counting(guarded(app, config, keys, is_local), service.metrics, app.routes)
    limits = ConnectionLimits()
    most = min(limits.max_connections, max(1, max_files - RESERVED_FILES))
    return service, HttpServer(counted, config, replace(limits, max_connections=most))
