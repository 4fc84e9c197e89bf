"""Endpoints that pause engines and give back memory of their devices, for trainers. The names are vLLM's.

The server has them only with --dev-endpoints: whoever may call them decides whether requests of others are answered.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from jaxvllm.core.errors import UnsupportedParameterError
from jaxvllm.core.pause import PauseMode, SleepTag
from jaxvllm.engine.commands import AbortRequests
from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.fields import Reply, Strict
from jaxvllm.server.routes.documented import COMMON, GENERATES, ErrorResponse
from jaxvllm.server.routes.web_pages import refuse_web_page
from jaxvllm.server.service import Service


class PauseResponse(Reply):
    """The engines are paused, or compute again."""

    status: Literal["paused", "resumed"]


class AbortRequest(Strict):
    """The requests that are to end."""

    request_ids: list[str] | None = None  # the ids of their answers, or what they have as `request_id`; null: all


class AbortResponse(Reply):
    """Requests have ended."""

    status: Literal["aborted"] = "aborted"
    aborted: int  # how many; one whose form still compiles is not counted, and ends all the same


class PausedResponse(Reply):
    """Whether the engines are paused."""

    is_paused: bool


class SleepResponse(Reply):
    """The engines have given back memory."""

    status: Literal["sleeping"] = "sleeping"
    level: int


class ReleaseResponse(Reply):
    """The engines have no KV pages."""

    status: Literal["kv_cache_released"] = "kv_cache_released"


class WakeUpResponse(Reply):
    """Whether the engines compute again, or something still sleeps."""

    status: Literal["awake", "sleeping"]
    tags: list[SleepTag] | None


_CONFLICT = {409: {"model": ErrorResponse, "description": "The engines are not in a state in which that is possible"}}
_ANSWERS = COMMON | _CONFLICT | {status: GENERATES[status] for status in (500, 503, 504)}


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Development"], responses=_ANSWERS)
    llm = service.llm

    @asynccontextmanager
    async def changing(request: Request) -> AsyncIterator[None]:
        """Refuses web pages, because any page could make a browser send such a request, and limits the time."""
        refuse_web_page(request, "change what the engines do")
        try:
            async with asyncio.timeout(service.config.request_timeout):
                yield
        except NotImplementedError as error:
            raise UnsupportedParameterError(str(error), "level") from error
        except ValueError as error:
            raise ApiError(409, str(error)) from error

    @routes.post("/pause")
    async def pause(
        request: Request, mode: Annotated[PauseMode, Query()] = "abort", clear_cache: bool = True
    ) -> PauseResponse:
        """Stops the engines, and answers when no step is under way. Requests that come meanwhile wait for `/resume`.

        With `mode=abort`, open requests end now with the finish reason `abort`. With `wait`, those that have begun are
        computed to their ends first; when `--request-timeout` is over before, the pause stays and the answer is an
        error. With `keep`, all stay where they are and go on after `/resume`, also with other weights. Unless requests
        are kept, cached prefixes are forgotten, which `clear_cache=false` prevents.

        An engine that is started again meanwhile is paused, too. The endpoint exists only with `--dev-endpoints`, and
        refuses web pages.
        """
        async with changing(request):
            await llm.pause(mode, clear_cache)
        return PauseResponse(status="paused")

    @routes.post("/resume")
    async def resume(request: Request) -> PauseResponse:
        """Lets the engines compute again after `/pause`. While weights or pages sleep, it answers 409: use `/wake_up`.

        The endpoint exists only with `--dev-endpoints`, and refuses web pages.
        """
        async with changing(request):
            await llm.resume()
        return PauseResponse(status="resumed")

    @routes.post("/abort_requests")
    async def abort_requests(body: AbortRequest, request: Request) -> AbortResponse:
        """Ends open requests now, with the finish reason `abort` and the tokens that they have. Nothing is paused.

        An id that is unknown, or whose request has ended, has no effect. Without the field `request_ids` all requests
        end; with an empty list none does. The endpoint exists only with `--dev-endpoints`, and refuses web pages.
        """
        async with changing(request):
            wanted = None if body.request_ids is None else frozenset(body.request_ids)
            return AbortResponse(aborted=await llm.ask(AbortRequests(wanted)))

    @routes.get("/is_paused")
    async def is_paused() -> PausedResponse:
        """Answers whether the engines are paused. The endpoint exists only with `--dev-endpoints`."""
        return PausedResponse(is_paused=await llm.is_paused())

    @routes.post("/sleep")
    async def sleep(
        request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: Annotated[PauseMode, Query()] = "abort",
    ) -> SleepResponse:
        """Pauses the engines, as `/pause` does, and gives back memory of their devices.

        Level 0 gives back none. Level 1 gives back that of KV pages, and that of weights, which go to the host's
        memory; on CPUs they are there already and stay. Level 2 drops the weights, which must be replaced before the
        engines compute again. Requests that come meanwhile wait for `/wake_up`; those that are kept compute all their
        tokens again. Engines with `--kv-transfer-config` only have level 0.

        The endpoint exists only with `--dev-endpoints`, and refuses web pages.
        """
        async with changing(request):
            await llm.sleep(level, mode)
        return SleepResponse(level=level)

    @routes.post("/release_kv_cache_memory")
    async def release_kv_cache_memory(request: Request) -> ReleaseResponse:
        """Gives back the memory of KV pages of engines that are paused, until `/wake_up?tags=kv_cache`.

        Requests that the pause has kept compute all their tokens again. The endpoint exists only with
        `--dev-endpoints`, and refuses web pages.
        """
        async with changing(request):
            await llm.release_kv()
        return ReleaseResponse()

    @routes.post("/wake_up")
    async def wake_up(request: Request, tags: Annotated[list[SleepTag] | None, Query()] = None) -> WakeUpResponse:
        """Brings back what sleeps: `tags=weights`, `tags=kv_cache`, or everything. Then the engines compute again.

        The status is `sleeping` while something is missing: the other tag, or weights that level 2 has dropped.
        The endpoint exists only with `--dev-endpoints`, and refuses web pages.
        """
        async with changing(request):
            is_awake = await llm.wake_up(tags)
        return WakeUpResponse(status="awake" if is_awake else "sleeping", tags=tags)

    return routes
