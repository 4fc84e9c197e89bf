"""Endpoints with information on the server: its models, health, readiness, version, load and metrics."""

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import jaxvllm
from jaxvllm.server.errors import RETRY_AFTER
from jaxvllm.server.protocol.fields import new_id
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service

# The header by which Anthropic's clients say that they are Anthropic's.
ANTHROPIC = "anthropic-version"


class ModelPermission(BaseModel):
    """A client's permissions for a model, in OpenAI's old form, which some clients still read."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxvllm"
    root: str
    parent: str | None = None  # the model that an adapter belongs to; None: it is the model itself
    max_model_len: int | None
    permission: list[ModelPermission]


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """The state of the server, which says whether it takes requests."""

    status: str
    reason: str


class Version(BaseModel):
    """The version of this software."""

    version: str


class Sleep(BaseModel):
    """Whether the engine sleeps, which gateways for vLLM ask."""

    is_sleeping: bool


class Load(BaseModel):
    """The server's present load."""

    server_load: int  # requests that have not been answered, as in vLLM
    num_requests_running: int
    num_requests_waiting: int


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter()
    llm = service.llm
    permission = ModelPermission(id=new_id("modelperm-"), created=service.created)

    def card(name: str) -> ModelCard:
        length = llm.reader.max_model_len if llm.is_known else None
        is_adapter = service.adapters.get(name) is not None
        return ModelCard(
            id=name,
            created=service.created,
            root=name if is_adapter else service.model_names[0],  # and no path of this host
            parent=service.model_names[0] if is_adapter else None,
            max_model_len=length,
            permission=[permission],
        )

    def anthropic_card(name: str) -> dict[str, Any]:
        length = llm.reader.max_model_len if llm.is_known else None
        created = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = {"id": name, "type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
        return told | {"max_input_tokens": length, "max_tokens": length}

    @routes.get("/v1/models", tags=["OpenAI"], response_model=ModelList, responses=COMMON)
    async def list_models(request: Request) -> Any:
        """Lists the names that `model` may have: all names of the model, and then those of its adapters.

        With the header `anthropic-version`, the answer has the shape of Anthropic's API.
        """
        names = (*service.model_names, *(one.lora_name for one in service.adapters))
        if ANTHROPIC not in request.headers:
            return ModelList(data=[card(name) for name in names])
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"data": [anthropic_card(name) for name in names]} | page)

    @routes.get(
        "/v1/models/{name:path}", tags=["OpenAI"], response_model=ModelCard, responses=COMMON | {404: GENERATES[404]}
    )
    async def retrieve_model(name: str, request: Request) -> Any:
        """Describes the model that has this name, in the shape of OpenAI's API or of Anthropic's."""
        known = service.model_name(name)
        return card(known) if ANTHROPIC not in request.headers else JSONResponse(anthropic_card(known))

    @routes.get("/health", tags=["Server"], response_class=Response, responses=_STARTING)
    async def health() -> Response:
        """Answers 200 from the first time that an engine is ready until the server ends, and 503 before.

        vLLM's server does not listen before. If an engine dies later, the server starts it again: `/ready` tells that.
        """
        if llm.is_known:
            return Response(status_code=200)
        status = Status(status=llm.state, reason=f"the model {service.model_names[0]} is not ready: {llm.reason}")
        return JSONResponse(status.model_dump(), 503, {"Retry-After": str(RETRY_AFTER)})

    @routes.get("/live", tags=["Server"], response_class=Response)
    async def live() -> Response:
        """Answers 200 as long as the server's process is alive, even if no engine is."""
        return Response(status_code=200)

    @routes.get("/ready", tags=["Server"], response_model=Status, responses={503: {"model": Status}})
    async def ready(response: Response) -> Status:
        """Answers 200 when the server takes requests: the engine is idle and answers, or its steps make progress."""
        if service.is_ready:
            return Status(status="ready", reason=llm.reason)
        if service.draining:
            status = Status(status="draining", reason="the server is shutting down")
        else:
            stuck = llm.state == "ready"
            status = Status(
                status="stuck" if stuck else llm.state,
                reason="the engine has not answered lately" if stuck else llm.reason,
            )
        response.status_code = 503
        return status

    @routes.get("/version", tags=["Server"], responses=COMMON)
    async def version() -> Version:
        """Returns the version of jaxvllm that is running."""
        return Version(version=jaxvllm.__version__)

    @routes.get("/is_sleeping", tags=["Server"], responses=COMMON)
    async def is_sleeping() -> Sleep:
        """Answers whether the engines are paused or sleep, as `--dev-endpoints` allows. Gateways for vLLM ask this."""
        return Sleep(is_sleeping=service.config.dev_endpoints and await llm.is_sleeping())

    @routes.get("/load", tags=["Server"], responses=COMMON)
    async def load() -> Load:
        """Returns the number of requests that are open, running and waiting."""
        stats = llm.stats
        return Load(
            server_load=service.num_open,
            num_requests_running=0 if stats is None else stats.num_running,
            num_requests_waiting=0 if stats is None else stats.num_waiting,
        )

    @routes.get("/metrics", tags=["Server"], response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        """Returns the metrics for Prometheus."""
        body, kind = await service.render_metrics()
        return Response(body, media_type=kind)

    return routes


_STARTING: dict[int | str, dict[str, Any]] = {
    503: {"model": Status, "description": "The model has never been ready: the reason says what is waited for"}
}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's text format"},
    401: COMMON[401],
}
