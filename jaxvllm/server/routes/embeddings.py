"""`POST /v1/embeddings`."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.pooler import Pooling
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import respond
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from jaxvllm.server.protocol.fields import now
from jaxvllm.server.routes.documented import GENERATES
from jaxvllm.server.service import Service
from jaxvllm.text.prompts import PromptRoom

# Fields that would have no effect in a request without messages.
OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse, responses=GENERATES)
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """Makes a vector of each text: the hidden state of its last token, or the mean over its tokens.

        The checkpoint chooses between these, or `--pooler-config` does.
        """
        return await create(service, body, request)

    return routes


async def create(service: Service, body: EmbeddingRequest, request: Request) -> Response:
    """Answers `body`, the body of `request`."""
    model = await service.found_model(body.model)
    pooler = service.llm.facts.pooler
    if pooler is None:
        raise ApiError(400, "this server's engine makes no vectors of texts")
    params = body.pooling_params()
    pooling = pooler.resolve(params)
    sampling = Pooling.sampling_params(params.truncate_prompt_tokens)
    prompts = await run_in_threadpool(_read, service, body, PromptRoom.of(sampling, is_pooled=True))
    answer_id, engine_id = RequestId.of(request).names("embd-", body.request_id)
    ids = [engine_id] if len(prompts) == 1 else [f"{engine_id}-{index}" for index in range(len(prompts))]
    asked = [
        GenerationRequest(
            name,
            replace(prompt, cache_salt=body.cache_salt),
            sampling,
            body.priority,
            pooling=pooling,
            answer_id=answer_id,
        )
        for name, prompt in zip(ids, prompts, strict=True)
    ]
    asked = service.adapted(model, asked)

    def whole(outputs: list[RequestOutput]) -> dict[str, Any]:
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        vectors = [output.pooled for output in outputs]
        return {
            "id": answer_id,
            "object": "list",
            "created": now(),
            "model": model,
            "data": [
                {"index": index, "object": "embedding", "embedding": body.encoded(vector)}
                for index, vector in enumerate(vectors)
                if vector is not None
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    return await respond(request, service, asked, whole)


def _read(service: Service, body: EmbeddingRequest, room: PromptRoom) -> list[Prompt]:
    if (body.input is None) == (body.messages is None):
        raise ApiError(400, "give either input or messages", param="input")
    if body.messages is not None:
        text = service.apply_chat_template(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        adds = bool(body.add_special_tokens)
        return [service.read_prompt(text, field="messages", add_special_tokens=adds, room=room)]
    for name in OF_MESSAGES:
        if getattr(body, name):
            raise ApiError(400, f"{name} belongs to messages, not to an input: leave it out", param=name)
    adds = body.add_special_tokens is not False
    return service.read_prompts(body.inputs(), field="input", add_special_tokens=adds, room=room)
