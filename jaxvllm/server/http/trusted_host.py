"""Checks the Host header, so that a web page from elsewhere cannot use the server on its reader's machine."""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxvllm.server.errors import ApiError

# Names of this machine inside its containers. A page from elsewhere cannot redefine them.
CONTAINER_NAMES = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")


class TrustedHost:
    """ASGI middleware that answers 403 unless the Host is a name of this machine for itself, or one of `names`.

    A page of evil.example can point that name at 127.0.0.1 after it was loaded (DNS rebinding). The browser then takes
    our server for the page's own and lets the page read the answers, but the Host is still evil.example.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        self._app = app
        self._names = {*CONTAINER_NAMES, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_known(_host(scope)):
            text = "this server has no API key, so it answers only to localhost: give it one, or --allowed-host NAME"
            await ApiError(403, text).response(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        if not host:  # HTTP/1.0, which no browser sends
            return True
        if host in self._names or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _host(scope: Scope) -> str:
    """Returns the Host header in lower case, without its port and without the brackets of an IPv6 address."""
    value = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1").strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]
