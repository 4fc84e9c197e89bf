"""Runs the whole router: it opens the socket, passes requests on, and shuts down after a signal."""

import asyncio
import logging

from jaxvllm.router.config import RouterConfig
from jaxvllm.router.proxy import Proxy
from jaxvllm.server.http.http_door import HttpDoor
from jaxvllm.server.lifecycle import StopSignals, drain, until_first

logger = logging.getLogger(__name__)

# A client's own connection, and the one to the server that answers it.
FILES_EACH = 2


async def serve(config: RouterConfig) -> int:
    """Passes requests on until a signal, and returns the exit code, which is that of a server.

    Raises ValueError when an option is wrong, and OSError when it cannot listen on the address.
    """
    with HttpDoor.opened(config) as door, StopSignals() as stop:
        proxy = Proxy(config)
        server = door.server(proxy.app, files_each=FILES_EACH)
        logger.info("passing requests on at %s", door.url)
        async with proxy.running(), server.running(door.listener) as serving:
            await until_first(stop.asked(), asyncio.shield(serving))
            is_clean = await drain(proxy, stop)
            if stop.is_urgent:
                server.hurry()
    return stop.exit_code(is_clean)
