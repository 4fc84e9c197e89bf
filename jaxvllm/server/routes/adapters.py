"""Endpoints that load and unload adapters while the server runs. The names are vLLM's.

The server has them only with --lora-directory.
"""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from jaxvllm.server.protocol.fields import Strict
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.routes.web_pages import refuse_web_page
from jaxvllm.server.service import Service


class LoadAdapterRequest(Strict):
    """An adapter that requests may name from now on."""

    lora_name: str
    lora_path: str  # a directory within --lora-directory, which every engine can read
    load_inplace: bool = False  # replace the adapter that has this name
    is_3d_lora_weight: bool = False  # has no effect: the shapes tell in which form the adapters of experts are


class UnloadAdapterRequest(Strict):
    """An adapter that new requests may not name any more."""

    lora_name: str
    lora_int_id: int | None = None  # has no effect: the name says which


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Server"])

    @routes.post(
        "/v1/load_lora_adapter",
        response_class=PlainTextResponse,
        responses=COMMON | {status: GENERATES[status] for status in (500, 503)},
    )
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> str:
        """Loads an adapter, and lets requests name it as their `model`.

        All engines read and check it first, and if one of them cannot, nothing has changed. With `load_inplace` the
        name may be in use: requests that run go on with the old adapter, and new ones get the new one. The endpoint
        exists only with `--lora-directory`, and refuses web pages.
        """
        refuse_web_page(request, "change the adapters")
        adapter = await service.adapter_loader.load(body.lora_name, body.lora_path, body.load_inplace)
        return f"Success: LoRA adapter '{adapter.lora_name}' added successfully."

    @routes.post(
        "/v1/unload_lora_adapter",
        response_class=PlainTextResponse,
        responses=COMMON | {status: GENERATES[status] for status in (404, 500, 503)},
    )
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> str:
        """Takes the name of an adapter away. Requests that run go on with it.

        The endpoint exists only with `--lora-directory`, and refuses web pages.
        """
        refuse_web_page(request, "change the adapters")
        adapter = await service.adapter_loader.unload(body.lora_name)
        return f"Success: LoRA adapter '{adapter.lora_name}' removed successfully."

    return routes
