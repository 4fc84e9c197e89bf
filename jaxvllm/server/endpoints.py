"""The endpoints of an application, and what is told of those that it has not."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxvllm.server.errors import TEXT_ONLY, ApiError

# What to tell of paths that other servers have, by how they begin without /v1.
_ELSEWHERE: Mapping[str, str] = {
    "/images": TEXT_ONLY,
    "/audio": TEXT_ONLY,
    "/videos": TEXT_ONLY,
    "/realtime": TEXT_ONLY,
    "/embeddings": "did you mean /v1/embeddings?",
    "/pooling": "POST /v1/embeddings makes a vector of each text, and nothing else is pooled yet",
    "/classify": "classes and scores of texts are not supported yet",
    "/score": "classes and scores of texts are not supported yet",
    "/rerank": "classes and scores of texts are not supported yet",
    "/moderations": "nothing is moderated here",
    "/files": "`jaxvllm run-batch` answers files of requests",
    "/batches": "`jaxvllm run-batch` answers files of requests",
    "/responses/compact": 'no conversation is compacted here, and truncation: "auto" drops the beginning of a long one',
    "/fine_tuning": "models are not trained here",
    "/load_lora_adapter": "start the server with --enable-lora and --lora-directory",
    "/unload_lora_adapter": "start the server with --enable-lora and --lora-directory",
    "/assistants": "POST /v1/responses is the newer API",
    "/threads": "POST /v1/responses is the newer API",
}
# Paths of other servers that look like the path of a stored response.
_NO_IDS = ("/v1/responses/compact",)
# Of the endpoints, those that most people look for.
_MAIN = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/models",
)


class KnownEndpoints:
    """ASGI middleware that passes on requests for the paths and methods of `routes`.

    Others get 404 or 405, which name what exists, whatever their body is. `around` is put around this answer.
    """

    def __init__(
        self, app: ASGIApp, routes: Iterable[BaseRoute], around: Callable[[ASGIApp], ASGIApp] = lambda app: app
    ):
        self._app = app
        self._routes = tuple(flat(routes))
        self._around = around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if response is None else self._around(response))(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        matches = [(route.matches({**scope, "method": method})[0], route) for route in self._routes]
        if any(match is Match.FULL for match, _ in matches):
            return None
        partial = [route for match, route in matches if match is Match.PARTIAL]
        path = scope["path"]
        if partial and path not in _NO_IDS:
            methods = sorted({name for route in partial for name in getattr(route, "methods", None) or ()} - {"HEAD"})
            text = f"{path} does not take {method}: use {' or '.join(methods)}"
            return ApiError(405, text, methods=methods).response(scope)
        text = f"there is no endpoint {path}: {self._instead(path)} (GET /docs lists all)"
        return ApiError(404, text).response(scope)

    def _instead(self, path: str) -> str:
        plain = path.removeprefix("/v2").removeprefix("/v1")
        told = next((text for start, text in _ELSEWHERE.items() if plain.startswith(start)), None)
        if told is not None:
            return told
        known = [name for route in self._routes if (name := getattr(route, "path", "")) and "{" not in name]
        # People forget /v1, or write it twice.
        near = difflib.get_close_matches(path, known, 1) or difflib.get_close_matches(f"/v1{path}", known, 1)
        if near:
            return f"did you mean {near[0]}?"
        main = [name for name in _MAIN if name in known]
        return f"there are {', '.join(main)} and others"


def flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Yields all routes, those of FastAPI's included routers, too."""
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:  # FastAPI's object for an included router
            yield from flat(router.routes)
        else:
            yield route
