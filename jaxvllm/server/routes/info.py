"""What a server tells of itself: models, health, readiness, version, load and metrics."""

from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

import jaxvllm
from jaxvllm.server.protocol.fields import new_id
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service


class ModelPermission(BaseModel):
    """What a client may do with a model, in OpenAI's old form, which some clients still read."""

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
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxvllm"
    root: str
    parent: str | None = None  # of an adapter; there are none
    max_model_len: int | None
    permission: list[ModelPermission]


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """Whether requests are taken."""

    status: str
    reason: str


class Version(BaseModel):
    """Of this software."""

    version: str


class Load(BaseModel):
    """Work that is there."""

    server_load: int  # requests that have not been answered, as vLLM's
    num_requests_running: int
    num_requests_waiting: int


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()
    llm = service.llm
    permission = ModelPermission(id=new_id("modelperm-"), created=service.created)

    def card(name: str) -> ModelCard:
        length = llm.reader.max_model_len if llm.is_known else None
        return ModelCard(
            id=name,
            created=service.created,
            root=service.model_names[0],
            max_model_len=length,
            permission=[permission],
        )

    @routes.get("/v1/models", tags=["OpenAI"], responses=COMMON)
    async def list_models() -> ModelList:
        """The names that `model` may have; all of them mean the same model."""
        return ModelList(data=[card(name) for name in service.model_names])

    @routes.get("/v1/models/{name:path}", tags=["OpenAI"], responses=COMMON | {404: GENERATES[404]})
    async def retrieve_model(name: str) -> ModelCard:
        """One of them."""
        return card(service.model_name(name))

    @routes.get("/health", tags=["Server"], response_class=Response)
    async def health() -> Response:
        """This process answers."""
        return Response(status_code=200)

    @routes.get("/ready", tags=["Server"], response_model=Status, responses={503: {"model": Status}})
    async def ready(response: Response) -> Status:
        """Requests are taken: the engine is idle and answers, or its steps make progress."""
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
        """What runs here."""
        return Version(version=jaxvllm.__version__)

    @routes.get("/load", tags=["Server"], responses=COMMON)
    async def load() -> Load:
        """How much there is to do."""
        stats = llm.stats
        return Load(
            server_load=service.num_open,
            num_requests_running=0 if stats is None else stats.num_running,
            num_requests_waiting=0 if stats is None else stats.num_waiting,
        )

    @routes.get("/metrics", tags=["Server"], response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        """For Prometheus."""
        body, kind = service.metrics.render()
        return Response(body, media_type=kind)

    return routes


_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's text format"},
    401: COMMON[401],
}
