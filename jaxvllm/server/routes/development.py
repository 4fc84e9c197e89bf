"""Endpoints for measurements and tests. The server has them only with --dev-endpoints."""

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request, Response

from jaxvllm.core.errors import ParameterError
from jaxvllm.engine.commands import UpdateWeights
from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.fields import Reply, Strict
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service


class UpdateWeightsRequest(Strict):
    """The weights that are to replace those of the engines."""

    model_path: str  # an absolute directory on the host of every engine, with safetensors of the same model


class UpdateWeightsResponse(Reply):
    """The weights of all engines are replaced."""

    success: bool
    message: str


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
        _refuse_web_page(request, "reset the prefix cache")
        async with asyncio.timeout(service.config.request_timeout):
            await service.llm.reset_prefix_cache(reset_running_requests, reset_external)
        return Response(status_code=200)

    @routes.post("/update_weights_from_disk", responses=COMMON | {s: GENERATES[s] for s in (500, 503)})
    async def update_weights_from_disk(body: UpdateWeightsRequest, request: Request) -> UpdateWeightsResponse:
        """Replaces the weights of every engine by those of a directory, as a trainer does; the endpoint is SGLang's.

        All tensors are checked first, so that each engine has either all of the new weights or all of the old ones.
        Requests that run go on with the new weights, and cached prefixes are forgotten. An engine that is started
        again reads the same directory, which must stay.

        The endpoint exists only with `--dev-endpoints`. It refuses web pages, because any page could make a browser
        send this request.
        """
        _refuse_web_page(request, "replace the weights")
        if not Path(body.model_path).is_absolute():
            raise ApiError(400, f"model_path must be absolute, not {body.model_path[:60]!r}", param="model_path")
        try:
            await service.llm.ask(UpdateWeights(body.model_path))
        except (ValueError, NotImplementedError) as error:
            raise ParameterError(str(error), "model_path") from error
        return UpdateWeightsResponse(success=True, message="")

    return routes


def _refuse_web_page(request: Request, what: str) -> None:
    if "origin" in request.headers:
        raise ApiError(403, f"a web page may not {what}: use a program such as curl")
