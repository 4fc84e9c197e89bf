"""The endpoints of stored responses: `/v1/responses/{response_id}` and its items."""

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.server.errors import ApiError
from jaxvllm.server.http.auth import key_digest
from jaxvllm.server.protocol.responses import DeletedResponse, InputItemList, ResponsesResponse
from jaxvllm.server.response_store import ResponseStore
from jaxvllm.server.routes.documented import COMMON, NOT_STORED
from jaxvllm.server.service import Service


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["OpenAI"])
    told = COMMON | NOT_STORED

    @routes.get("/v1/responses", include_in_schema=False)
    async def refuse_websocket(request: Request) -> Response:
        """Tells clients that try a WebSocket first, as Codex may, to send a POST instead.

        At any other status, Codex tries five times more, which takes it 6 s.
        """
        if "sec-websocket-version" in request.headers:
            raise ApiError(426, "this endpoint has no WebSocket: send a POST, with stream: true for events")
        text = "this endpoint takes POST: GET /v1/responses/ID returns a stored response"
        raise ApiError(405, text, methods=["POST"])

    @routes.get("/v1/responses/{response_id}", response_model=ResponsesResponse, responses=told)
    async def retrieve_response(response_id: str, request: Request, stream: bool = False) -> Response:
        """Returns a stored response, once it has ended, to the API key that asked for it."""
        if stream:
            raise ApiError(400, "stream: true is not supported for a response that has ended", param="stream")
        found = _store(service).get(key_digest(request.headers.raw), response_id)
        return Response(found.response, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}", responses=told)
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Forgets a stored response."""
        _store(service).remove(key_digest(request.headers.raw), response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    @routes.post("/v1/responses/{response_id}/cancel", responses=told)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Refuses, because only a response in the background can be cancelled. Close the connection of others."""
        _store(service).get(key_digest(request.headers.raw), response_id)
        raise ApiError(400, "Cannot cancel a synchronous response: it did not run in the background, and has ended")

    @routes.get("/v1/responses/{response_id}/input_items", responses=told)
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> InputItemList:
        """Lists the items that a stored response answers, with those of the responses that it follows."""
        found = _store(service).get(key_digest(request.headers.raw), response_id)
        return await run_in_threadpool(_listed, found.items, limit, order, after)

    return routes


def _store(service: Service) -> ResponseStore:
    if service.responses is None:
        raise ApiError(404, "this server has several API processes, and stores no responses: start it with one")
    return service.responses


def _listed(encoded: bytes, limit: int, order: str, after: str | None) -> InputItemList:
    items = json.loads(encoded)
    if order == "desc":
        items.reverse()
    if after is not None:
        start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), None)
        if start is None:
            raise ApiError(404, f"there is no item {after!r:.80} in this response", param="after")
        items = items[start:]
    data = items[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return InputItemList(object="list", data=data, first_id=first, last_id=last, has_more=len(items) > limit)
