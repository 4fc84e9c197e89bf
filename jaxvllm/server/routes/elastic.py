"""Endpoints that change the number of replicas while the server runs. The names are vLLM's.

The server has them only with --enable-elastic-ep: each replica is a process with a copy of the model.
"""

import logging
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.fields import Reply, Strict
from jaxvllm.server.routes.documented import COMMON, GENERATES, ErrorResponse
from jaxvllm.server.routes.web_pages import refuse_web_page
from jaxvllm.server.service import Service
from jaxvllm.worker.engine_pool import EnginePool, ScalingError

logger = logging.getLogger(__name__)

# Beyond this a number is a mistake. The places of replicas have limits of their own.
MOST_REPLICAS = 1024


class ScaleRequest(Strict):
    """The number of replicas that there shall be."""

    new_data_parallel_size: Annotated[int, Field(ge=1, le=MOST_REPLICAS)]
    # Seconds in which replicas that end may finish their requests; what is left then is computed by the others
    drain_timeout: Annotated[float, Field(gt=0)] = 120


class ScaleResponse(Reply):
    """Says that it is done."""

    message: str


class ScalingResponse(Reply):
    """Whether replicas are being added or removed."""

    is_scaling_elastic_ep: bool


_CONFLICT = {409: {"model": ErrorResponse, "description": "The number of replicas is being changed already"}}


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Server"])
    pool = service.llm if isinstance(service.llm, EnginePool) else None

    @routes.post("/scale_elastic_ep", responses=COMMON | _CONFLICT | {500: GENERATES[500]})
    async def scale(body: ScaleRequest, request: Request) -> ScaleResponse:
        """Adds replicas, or ends the last ones, and answers when that is done. No request is dropped.

        New replicas take requests as soon as they are ready. Replicas that end get no new requests and finish theirs;
        requests that take longer than `drain_timeout` are computed by the other replicas, with the same tokens. It
        refuses web pages, because any page could make a browser send this request. The endpoint exists only with
        `--enable-elastic-ep`.
        """
        refuse_web_page(request, "change the number of replicas")
        if pool is None:
            raise ApiError(400, "the number of replicas is fixed with one engine, or with several API processes")
        try:
            await pool.scale(body.new_data_parallel_size, body.drain_timeout)
        except ValueError as error:
            raise ApiError(400, str(error), param="new_data_parallel_size") from None
        except ScalingError as error:
            raise ApiError(409, str(error)) from None
        except RuntimeError as error:
            logger.error("replicas could not be added: %s", error)
            raise ApiError(500, f"the replicas could not be added, and their number is as before: {error}") from error
        return ScaleResponse(message=f"Scaled to {body.new_data_parallel_size} data parallel engines")

    @routes.get("/is_scaling_elastic_ep", responses=COMMON)
    @routes.post("/is_scaling_elastic_ep", responses=COMMON)
    async def is_scaling() -> ScalingResponse:
        """Answers whether replicas are being added or removed."""
        return ScalingResponse(is_scaling_elastic_ep=pool is not None and pool.is_scaling)

    return routes
