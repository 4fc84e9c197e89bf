"""Endpoints for measurements and tests. The server has them only with --dev-endpoints."""

import asyncio
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.weight_version import MOST_CHARACTERS, KVChange
from jaxvllm.engine.commands import AbortRequests, NameWeights, ShowWeightVersions, UpdateWeights
from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.fields import Reply, Strict
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.routes.web_pages import refuse_web_page
from jaxvllm.server.service import Service

VersionName = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
# vLLM's steps of an update in which a trainer sends tensors from its GPUs to those of the engines.
_STEPS_BETWEEN_GPUS = ("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update")
_BETWEEN_GPUS = (
    "vLLM's backends, such as nccl and ipc, send tensors from one GPU to another, which this server does not take: "
    "write a checkpoint where the hosts of all engines find it, and give its directory as model_path of "
    "POST /update_weights"
)


class NewVersion(Strict):
    """The name of new weights, and what they mean for requests that run."""

    weight_version: VersionName | None = None  # means the same weights in all engines that exchange pages; null: new
    kv: KVChange = "drop"  # keep: requests that run go on with their keys and values, and do not compute them again


class UpdateWeightsRequest(NewVersion):
    """The weights that are to replace those of the engines."""

    model_path: str  # an absolute directory on the host of every engine, with safetensors of the same model


class UpdateWeightsResponse(Reply):
    """The weights of all engines are replaced."""

    success: bool
    message: str


class VllmUpdateRequest(NewVersion):
    """The same, for clients that know vLLM's endpoint."""

    model_path: str | None = None  # required: the same as in `POST /update_weights_from_disk`
    update_info: dict[str, Any] | None = None  # not supported: vLLM's description of tensors on GPUs


class NewVersionName(Strict):
    """Another name for the weights that the engines have."""

    new_version: VersionName
    abort_all_requests: bool = False  # end all open requests first


class VersionNamed(Reply):
    """The weights of all engines have another name."""

    success: bool = True
    message: str = ""
    new_version: str


class WeightInfo(Reply):
    """The weights that the engines have."""

    weight_version: str


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
        refuse_web_page(request, "reset the prefix cache")
        async with asyncio.timeout(service.config.request_timeout):
            await service.llm.reset_prefix_cache(reset_running_requests, reset_external)
        return Response(status_code=200)

    @routes.post("/update_weights_from_disk", responses=COMMON | {s: GENERATES[s] for s in (500, 503)})
    async def update_weights_from_disk(body: UpdateWeightsRequest, request: Request) -> UpdateWeightsResponse:
        """Replaces the weights of every engine by those of a directory, as a trainer does; the endpoint is SGLang's.

        All tensors are checked first, so that each engine has either all of the new weights or all of the old ones.
        Requests that run go on with the new weights, and with `kv` keep from the keys and values that they have. Cached
        prefixes are forgotten. An engine that is started again reads the same directory, which must stay.

        The endpoint exists only with `--dev-endpoints`. It refuses web pages, because any page could make a browser
        send this request.
        """
        await _update(service, request, body, body.model_path)
        return UpdateWeightsResponse(success=True, message="")

    @routes.post("/update_weights", responses=COMMON | {s: GENERATES[s] for s in (500, 503)})
    async def update_weights(body: VllmUpdateRequest, request: Request) -> WeightInfo:
        """Does the same as `POST /update_weights_from_disk` under vLLM's name, and answers with the new version.

        The directory must be given. vLLM's own `update_info`, and the endpoints with which vLLM begins and ends such an
        update, are refused with a sentence that says so.

        The endpoint exists only with `--dev-endpoints`. It refuses web pages, because any page could make a browser
        send this request.
        """
        if body.update_info is not None:
            raise ApiError(400, _BETWEEN_GPUS, param="update_info")
        if body.model_path is None:
            raise ApiError(400, "model_path is missing: give the directory of a checkpoint", param="model_path")
        return WeightInfo(weight_version=await _update(service, request, body, body.model_path))

    @routes.post("/update_weight_version", responses=COMMON | {s: GENERATES[s] for s in (500, 503)})
    async def update_weight_version(body: NewVersionName, request: Request) -> VersionNamed:
        """Gives the weights that all engines have another name, which answers tell from the next step on.

        The weights stay as they are, and so do cached prefixes. Fields are those of vLLM and SGLang. The endpoint
        exists only with `--dev-endpoints`, and refuses web pages.
        """
        refuse_web_page(request, "name the weights")
        if body.abort_all_requests:
            await service.llm.ask(AbortRequests(None))
        await service.llm.ask(NameWeights(body.new_version))
        return VersionNamed(new_version=body.new_version)

    @routes.get("/weight_info", responses=COMMON | {s: GENERATES[s] for s in (500, 503)})
    async def weight_info() -> WeightInfo:
        """Tells which version of the weights the engines have: `default` until they are replaced, as in vLLM.

        Where engines have several, because an update has failed in some of them, it is an error that names these. The
        endpoint exists only with `--dev-endpoints`.
        """
        of_engines = await service.llm.ask(ShowWeightVersions())
        versions = [*dict.fromkeys(of_engines)]
        if len(versions) > 1:
            told = ", ".join(versions)
            raise ApiError(503, f"the engines have weights of several versions, {told}: replace all of them again")
        return WeightInfo(weight_version=versions[0])

    for path in _STEPS_BETWEEN_GPUS:
        routes.add_api_route(path, _refuse_gpus, methods=["POST"], include_in_schema=False)
    return routes


async def _update(service: Service, request: Request, wanted: NewVersion, directory: str) -> str:
    """Replaces the weights of all engines, and returns the name of the new ones."""
    refuse_web_page(request, "replace the weights")
    if not Path(directory).is_absolute():
        raise ApiError(400, f"model_path must be absolute, not {directory[:60]!r}", param="model_path")
    version = wanted.weight_version or uuid4().hex  # engines count for themselves, and may have been started again
    try:
        return await service.llm.ask(UpdateWeights(directory, version, wanted.kv))
    except (ValueError, NotImplementedError) as error:
        raise ParameterError(str(error), "model_path") from error


async def _refuse_gpus() -> None:
    raise ApiError(400, _BETWEEN_GPUS)
