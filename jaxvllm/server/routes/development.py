"""What only measurements and tests need: the server has it with --dev-endpoints alone."""

import asyncio

from fastapi import APIRouter, Request, Response

from jaxvllm.server.errors import ApiError
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(tags=["Development"])

    @routes.post(
        "/reset_prefix_cache",
        response_class=Response,
        responses=COMMON | {status: GENERATES[status] for status in (500, 503, 504)},
    )
    async def reset_prefix_cache(request: Request) -> Response:
        """Forgets every cached prefix, and answers once every replica has. Running requests go on.

        Only with `--dev-endpoints`, and not from a web page: a browser would send this for any page.
        """
        if "origin" in request.headers:
            raise ApiError(403, "a web page may not reset the prefix cache: use a program such as curl")
        async with asyncio.timeout(service.config.request_timeout):
            await service.llm.reset_prefix_cache()
        return Response(status_code=200)

    return routes
