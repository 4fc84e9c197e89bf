"""Endpoints for measurements and tests. The server has them only with --dev-endpoints."""

import asyncio

from fastapi import APIRouter, Request, Response

from jaxvllm.server.errors import ApiError
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Development"])

    @routes.post(
        "/reset_prefix_cache",
        response_class=Response,
        responses=COMMON | {status: GENERATES[status] for status in (500, 503, 504)},
    )
    async def reset_prefix_cache(
        request: Request, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Response:
        """Forgets every cached prefix, and answers when every replica has done so.

        The query parameters are vLLM's. With `reset_external=true`, pages that `--kv-transfer-config` keeps outside of
        the pools are forgotten as well: those in memory at once; those in files stay for other engines, and this
        server takes them for absent. Running requests continue, or with `reset_running_requests=true` compute all their
        tokens again and then continue.

        The endpoint exists only with `--dev-endpoints`. It refuses web pages, because any page could make a browser
        send this request.
        """
        if "origin" in request.headers:
            raise ApiError(403, "a web page may not reset the prefix cache: use a program such as curl")
        async with asyncio.timeout(service.config.request_timeout):
            await service.llm.reset_prefix_cache(reset_running_requests, reset_external)
        return Response(status_code=200)

    return routes
