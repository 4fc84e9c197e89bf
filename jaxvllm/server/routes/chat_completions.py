"""`POST /v1/chat/completions`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import Prompt
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.exchange import DONE, Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.chat_completions import ChatRequest, ChatResponse, parts
from jaxvllm.server.protocol.fields import StreamOptions, params_of, usage, usage_of
from jaxvllm.server.protocol.logprobs import prompt_logprobs
from jaxvllm.server.routes.documented import STREAMED
from jaxvllm.server.service import Service
from jaxvllm.text.chat_messages import checked_messages
from jaxvllm.text.prompts import PromptRoom


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await create(service, body, request)

    return routes


async def create(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answers `body`, the body of `request`."""
    model = service.model_name(body.model)
    body.check_stream()
    params = params_of(
        service.defaults,
        body.chosen(),
        max_tokens=body.limit,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        stream=bool(body.stream),
    )
    prompt = await run_in_threadpool(_read, service, body, PromptRoom.of(params))
    service.check_room(prompt, body.limit, "max_tokens" if body.limit is body.max_tokens else "max_completion_tokens")
    answer_id, engine_id = RequestId.of(request).names("chatcmpl-", body.request_id)
    room = service.reader.max_model_len - len(prompt.token_ids)
    asked = body.request(engine_id, prompt, params, body.beams(params, room if body.limit is None else body.limit))
    exchange = _Exchange(body, service.answer_head(model), asked.prompt, answer_id)
    return await respond(request, service, [asked], exchange.whole, exchange.events)


class _Exchange:
    """One request, which makes the bodies of its answer."""

    def __init__(self, body: ChatRequest, head: dict[str, Any], prompt: Prompt, answer_id: str):
        self._body = body
        self._head = {"id": answer_id} | head
        self._prompt_ids = {"prompt_token_ids": prompt.token_list} if body.return_token_ids else {}
        [last] = checked_messages(body.messages[-1:])  # all were checked when the template was rendered
        self._echo = last["content"] or "" if body.echo and last["role"] == "assistant" else ""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        choices = []
        for completion in output.outputs:
            message = {"role": "assistant", "content": self._echo + completion.text, "refusal": None}
            choices.append(parts(self._body, completion) | {"message": message})
        head = self._head | {"object": "chat.completion"} | self._prompt_ids
        if output.prompt_logprobs is not None:
            head["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._body.prompt_logprobs or 0)
        return head | {"choices": choices, "usage": usage_of([output])}

    async def events(self, generation: Generation) -> Events:
        head = self._head | {"object": "chat.completion.chunk"}
        options = self._body.stream_options or StreamOptions()
        started: set[int] = set()
        num_prompt = num_tokens = num_cached = 0
        async for _, output in generation.outputs():
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
                shown: dict[str, Any] = {}
                if options.continuous_usage_stats:
                    shown["usage"] = usage(num_prompt, num_tokens, num_cached)
                elif self._body.stream_options:
                    shown["usage"] = None
                if completion.index not in started:
                    started.add(completion.index)
                    delta = {"role": "assistant", "content": self._echo}
                    first = {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}
                    yield event(head | self._prompt_ids | {"choices": [first]} | shown)
                made = parts(self._body, completion) | {"delta": {"content": completion.text}}
                yield event(head | {"choices": [made]} | shown)
        if options.include_usage:
            yield event(head | {"choices": [], "usage": usage(num_prompt, num_tokens, num_cached)})
        yield DONE


def _read(service: Service, body: ChatRequest, room: PromptRoom) -> Prompt:
    """Renders the conversation with the model's template and returns the prompt."""
    text = service.apply_chat_template(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return service.read_prompt(
        text,
        field="messages",
        add_special_tokens=bool(body.add_special_tokens),  # by default false, because the template writes them
        room=room,
    )
