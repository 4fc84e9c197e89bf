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
    async def reset_prefix_cache(request: Request) -> Response:
        """Forgets every cached prefix, and answers when every replica has done so. Running requests continue.

        The endpoint exists only with `--dev-endpoints`. It refuses web pages, because any page could make a browser
        send this request.
        """
        if "origin" in request.headers:
            raise ApiError(403, "a web page may not reset the prefix cache: use a program such as curl")
        async with asyncio.timeout(service.config.request_timeout):
            await service.llm.reset_prefix_cache()
        return Response(status_code=200)

    return routes
