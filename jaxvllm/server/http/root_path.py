"""ASGI middleware that takes the prefix of a proxy off the paths of requests."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Answers `/llm/v1/models` like `/v1/models` where the root path is `/llm`, and `/v1/models` as before.

    It stands before everything that looks at paths, such as the guards.
    """

    def __init__(self, app: ASGIApp, root_path: str):
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root_path}/"):
            raw = scope.get("raw_path") or b""
            prefix = self._root_path.encode()
            inner = {"path": scope["path"][len(self._root_path) :], "raw_path": raw.removeprefix(prefix)}
            scope = {**scope, **inner}
        await self._app(scope, receive, send)
