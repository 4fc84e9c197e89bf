"""Runs the whole server: it opens the socket, starts the engine, serves, and shuts down after a signal."""

import asyncio
import logging
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from os import cpu_count
from typing import TYPE_CHECKING

from jaxvllm.config import EngineConfig
from jaxvllm.server.config import ServerConfig, read_keys
from jaxvllm.server.http.listener import RESERVED_FILES, is_open_to_strangers, listen, raise_file_limit, url_of
from jaxvllm.server.lifecycle import StopSignals, drain, until_first
from jaxvllm.text.chat_template import read_chat_template
from jaxvllm.worker.async_llm import AsyncLLM, FollowedError
from jaxvllm.worker.queue_limits import QueueLimits

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from jaxvllm.server.http.http_server import HttpServer
    from jaxvllm.server.service import Service

logger = logging.getLogger(__name__)

# The events a second that all streams share, for each core and at most, unless the user sets a number. An event costs
# this process 60 us, half of them in the kernel, and on a CPU the engine waits for that core. At 750 a core, 64 streams
# on two cores cost the engine 17% of its tokens; at 500 each stream still moves 15 times a second.
OUTPUTS_PER_CORE, MOST_OUTPUTS = 500, 5000


async def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Serves until a signal, ends all its processes, and returns the exit code.

    After SIGTERM and SIGHUP the code is 0 when every request could finish, otherwise 1; after SIGINT it is 130. Raises
    ValueError when an option is wrong, OSError when it cannot listen on the address, and RuntimeError when the engine
    cannot be built. When the environment says that this process is one of several and not process 0, it computes for
    process 0, never becomes ready, and returns 0 when process 0 has ended.
    """
    start = time.monotonic()
    keys = read_keys(config)
    chat_template = None if config.chat_template is None else read_chat_template(config.chat_template)
    max_files = raise_file_limit()
    with listen(config.host, config.port, max_files) as listener, StopSignals() as stop:
        url = url_of(listener, config)
        if not keys and is_open_to_strangers(listener):
            logger.warning("every client that reaches %s may use this server: it has no --api-key", url)
        logger.info("listening on %s: /ready tells when model %s is loaded", url, engine.model)
        if engine.max_outputs_per_second is None:
            engine = replace(engine, max_outputs_per_second=min(OUTPUTS_PER_CORE * (cpu_count() or 1), MOST_OUTPUTS))
        limits = QueueLimits(config.max_num_queued_requests, config.max_num_queued_tokens)
        llm = AsyncLLM.from_config(engine, limits, chat_template)
        try:
            llm.launch()
            await asyncio.sleep(0)  # starts the engine's process, which imports JAX while this one imports FastAPI
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
                    # The remaining requests end with an error, which is still sent.
                    await until_first(llm.close(), stop.insisted())
                    if stop.is_urgent:
                        server.hurry()
        finally:
            await llm.close()
    if stop.first is signal.SIGINT:
        return 128 + signal.SIGINT
    return 0 if is_clean else 1


def guarded(app: "ASGIApp", config: ServerConfig, keys: Iterable[str], is_local: bool = False) -> "ASGIApp":
    """Returns `app` behind its guards. The server reads no body of a client that has no key.

    Without keys, a server that `is_local` (no other machine can reach it) answers only requests for its own names.
    """
    from starlette.middleware.cors import CORSMiddleware

    from jaxvllm.server.http.auth import Auth
    from jaxvllm.server.http.request_id import RequestIds
    from jaxvllm.server.http.request_limits import RequestLimits, StrictHead
    from jaxvllm.server.http.trusted_host import TrustedHost

    app = Auth(RequestLimits(app, config.max_body_bytes), keys, config.open_metrics)
    if config.allowed_origins:
        # Around `Auth`, because a browser asks without a key whether a page may send one, and because a page may read
        # that its key is wrong. Inside `TrustedHost`, which no origin can open.
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    if not keys and is_local and "*" not in config.allowed_host:
        app = TrustedHost(app, (config.host, *config.allowed_host))
    return RequestIds(StrictHead(app))


def _http(
    llm: AsyncLLM, config: ServerConfig, keys: Iterable[str], is_local: bool, max_files: int
) -> "tuple[Service, HttpServer]":
    # These imports take 0.8 s. Here they happen while the engine starts.
    from jaxvllm.server.app import create_app
    from jaxvllm.server.http.connection import ConnectionLimits
    from jaxvllm.server.http.http_server import HttpServer
    from jaxvllm.server.metrics.counting import Counting
    from jaxvllm.server.metrics.log_line import StatsLogger
    from jaxvllm.server.service import Service

    llm.observe(StatsLogger(config.log_stats_interval))
    service = Service(llm, config)
    app = create_app(service)
    counted = Counting(guarded(app, config, keys, is_local), service.metrics, app.routes)
    limits = ConnectionLimits()
    most = min(limits.max_connections, max(1, max_files - RESERVED_FILES))
    return service, HttpServer(counted, config, replace(limits, max_connections=most))
