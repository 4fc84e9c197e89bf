"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import Prompt
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.fields import params_of
from jaxvllm.server.protocol.messages import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
    ending,
    messages_usage,
)
from jaxvllm.server.routes.documented import COMMON, STREAMED, as_anthropic
from jaxvllm.server.service import Service


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=MessagesResponse, responses=as_anthropic(STREAMED))
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        model = service.model_name(body.model)
        params = params_of(
            service.defaults,
            body.chosen(),
            max_tokens=service.max_tokens(body.max_tokens),
            logprobs=None,
            stream=bool(body.stream),
        )
        prompt = await run_in_threadpool(_read, service, body)
        answer_id, engine_id = RequestId.of(request).names("msg_")
        exchange = _Exchange(model, answer_id)
        asked = [body.request(engine_id, prompt, params)]
        return await respond(request, service, asked, exchange.whole, exchange.events, _error_event)

    @routes.post("/v1/messages/count_tokens", responses=as_anthropic(COMMON | {404: STREAMED[404]}))
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """Counts the tokens of a conversation's prompt, which may be longer than the model takes."""
        service.model_name(body.model)
        return TokenCount(input_tokens=await run_in_threadpool(_count, service, body))

    return routes


class _Exchange:
    """One answer, which makes its bodies."""

    def __init__(self, model: str, answer_id: str):
        self._answer_id = answer_id
        self._model = model

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        [completion] = output.outputs
        usage = _usage(output, len(completion.token_ids))
        return self._message([_block(completion.text)], usage) | ending(completion)

    async def events(self, generation: Generation) -> Events:
        num_tokens = 0
        is_open = False
        async for _, output in generation.outputs():
            [completion] = output.outputs
            num_tokens += len(completion.token_ids)
            if not is_open:
                is_open = True
                yield _event("message_start", message=self._message([], _usage(output, 0)))
                yield _event("content_block_start", index=0, content_block=_block(""))
                yield _event("ping")
            if completion.text:
                delta = {"type": "text_delta", "text": completion.text}
                yield _event("content_block_delta", index=0, delta=delta)
            if output.finished:
                yield _event("content_block_stop", index=0)
                yield _event("message_delta", delta=ending(completion), usage=_usage(output, num_tokens))
                yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._answer_id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind} | data, kind)


def _error_event(error: ApiError) -> bytes:
    return event(error.anthropic_body(), "error")


def _usage(output: RequestOutput, num_tokens: int) -> dict[str, int]:
    return messages_usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens)


def _text(service: Service, body: ConversationFields) -> str:
    """Renders the conversation with the model's template and returns the text of the prompt."""
    return service.apply_chat_template(body.conversation(), continue_final_message=body.continues)


def _read(service: Service, body: MessagesRequest) -> Prompt:
    # The template writes the special tokens itself.
    text = _text(service, body)
    return service.read_prompt(text, field="messages", add_special_tokens=False)


def _count(service: Service, body: CountTokensRequest) -> int:
    return len(service.count_tokens(_text(service, body), add_special_tokens=False))
