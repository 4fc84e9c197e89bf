"""What only measurements and tests need: the server has it with --dev-endpoints alone."""

import asyncio

from fastapi import APIRouter, Response

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
    async def reset_prefix_cache() -> Response:
        """Forgets every cached prefix, and answers when no replica can find one any more. Running requests go on.

        Only with `--dev-endpoints`.
        """
        async with asyncio.timeout(service.config.request_timeout):
            await service.llm.reset_prefix_cache()
        return Response(status_code=200)

    return routes
