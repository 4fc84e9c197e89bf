"""Under which names a server may be asked for: a page from elsewhere must not reach the one on its reader's machine."""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxvllm.server.errors import ApiError

# This machine as its containers call it: names that no page from elsewhere can give a meaning to.
CONTAINER_NAMES = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")


class HostGuard:
    """ASGI middleware: 403 for a request whose Host is neither this machine's own name for itself nor one of `names`.

    A page of evil.example can point that name at 127.0.0.1 after it was loaded (DNS rebinding). Its requests then
    count as its own server's for the browser, which shows it the answers; but their Host is still evil.example.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        self._app = app
        self._names = {*CONTAINER_NAMES, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_known(_host(scope)):
            text = "this server has no API key, so it answers only to localhost: give it one, or --allowed-host NAME"
            await ApiError(403, text).response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        if not host:  # HTTP/1.0: no browser
            return True
        if host in self._names or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _host(scope: Scope) -> str:
    """The Host header without its port, in lower case, an IPv6 address without its brackets."""
    value = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1").strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]
