"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxvllm.server.routes.documented import COMMON, GENERATES
from jaxvllm.server.service import Service

# Fields that would have no effect in a request without messages.
OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Tokens"], responses=COMMON | {status: GENERATES[status] for status in (404, 503)})

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Returns the tokens of a text, or of the prompt that the template makes of a conversation."""
        await service.found_model(body.model)
        return await run_in_threadpool(_tokenize, service, body)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Returns the text of tokens."""
        await service.found_model(body.model)
        size = service.reader.vocab_size
        for index, token_id in enumerate(body.tokens):
            if not 0 <= token_id < size:
                where = f"tokens[{index}]"
                raise ApiError(400, f"{where}: {token_id} is outside the vocabulary of {size} tokens", param=where)
        text = await run_in_threadpool(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text)

    if service.config.enable_tokenizer_info_endpoint:

        @routes.get("/tokenizer_info")
        async def tokenizer_info() -> dict[str, Any]:
            """Returns the checkpoint's tokenizer_config.json, with the special tokens as plain strings and the chat
            template that is used. The endpoint exists only with `--enable-tokenizer-info-endpoint`.
            """
            return dict(service.tokenizer.info)

    return routes


def _tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    tokens = service.count_tokens(_text(service, body), add_special_tokens=_adds_special_tokens(body))
    backend = service.tokenizer.backend
    strings = [backend.id_to_token(token) or "" for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=service.reader.max_model_len, tokens=tokens, token_strs=strings
    )


def _text(service: Service, body: TokenizeRequest) -> str:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        return service.apply_chat_template(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            tools=[tool.tool().for_template() for tool in body.tools or ()],
            variables=body.chat_template_kwargs,
        )
    assert body.prompt is not None
    for name in OF_MESSAGES:
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} belongs to messages, not to a prompt: leave it out", param=name)
    return body.prompt


def _adds_special_tokens(body: TokenizeRequest) -> bool:
    return body.messages is None if body.add_special_tokens is None else body.add_special_tokens
