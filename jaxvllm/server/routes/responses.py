"""`POST /v1/responses`, and the count of its prompt's tokens."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import Prompt
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.answer import Answer
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.auth import key_digest
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.output_items import OutputItems
from jaxvllm.server.protocol.fields import now, params_of
from jaxvllm.server.protocol.response_format import form_given_as
from jaxvllm.server.protocol.response_items import ItemStatus
from jaxvllm.server.protocol.responses import (
    InputTokens,
    ResponsesRequest,
    ResponsesResponse,
    echoed,
    responses_usage,
    token_logprobs,
)
from jaxvllm.server.response_conversation import ResponseConversation
from jaxvllm.server.routes.documented import COMMON, STREAMED
from jaxvllm.server.service import Service
from jaxvllm.text.assistant_message import AssistantMessage
from jaxvllm.text.message_events import Event as Said
from jaxvllm.text.prompts import PromptRoom


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/responses", response_model=ResponsesResponse, responses=STREAMED)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a text or a conversation. The response is stored in memory, so that a request may follow it, unless
        `store` is false or the server has several API processes.
        """
        return await create(service, body, request)

    @routes.post("/v1/responses/input_tokens", responses=COMMON | {404: STREAMED[404]})
    async def count_input_tokens(body: ResponsesRequest, request: Request) -> InputTokens:
        """Counts the tokens of the prompt that such a request has, which may be longer than the model takes."""
        await service.found_model(body.model)
        count = await run_in_threadpool(_count, service, body, key_digest(request.headers.raw))
        return InputTokens(object="response.input_tokens", input_tokens=count)

    return routes


async def create(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """Answers `body`, the body of `request`."""
    model = await service.found_model(body.model)
    body.check_stream()
    service.llm.rules.check_logprobs("top_logprobs", body.num_logprobs)
    owner = key_digest(request.headers.raw)
    conversation = await run_in_threadpool(ResponseConversation.of, body, service.responses, owner)
    body = conversation.request
    params = params_of(
        service.defaults,
        body.chosen(),
        max_tokens=service.max_tokens(body.max_output_tokens),
        logprobs=body.num_logprobs,
        stream=bool(body.stream),
    )
    format = service.answer_format(body.tool_use())
    service.note_left_out(body.offered.hosted)
    prompt = await run_in_threadpool(_read, service, body, PromptRoom.of(params))
    service.check_limit(body.max_output_tokens, "max_output_tokens")
    answer_id, engine_id = RequestId.of(request).names("resp_", body.request_id)
    [asked] = service.adapted(model, [body.request(engine_id, answer_id, prompt, service.with_marks(params, format))])
    answer = Answer(format, service, asked.prompt, body.continued, body.shows_reasoning)

    exchange = _Exchange(body, answer, model, params, answer_id, conversation)
    with form_given_as(body.form_field):
        return await respond(
            request,
            service,
            [asked],
            exchange.whole,
            exchange.events,
            exchange.error_event,
            forced_calls=lambda: answer.forced_calls,
        )


class _Exchange:
    """One answer, which makes its bodies."""

    def __init__(
        self,
        body: ResponsesRequest,
        answer: Answer,
        model: str,
        params: SamplingParams,
        answer_id: str,
        conversation: ResponseConversation,
    ):
        self._body = body
        self._answer = answer
        self._conversation = conversation
        self._head = echoed(body, is_stored=conversation.is_stored) | {
            "id": answer_id,
            "object": "response",
            "created_at": now(),
            "model": model,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        self._num_events = 0
        self._items = OutputItems(body.offered)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        [completion] = output.outputs
        # A call that broke off is text here. A stream, which cannot foresee that, has begun it as a call.
        for said in AssistantMessage.of(self._read(completion)).events():
            self._items.read(said)
        self._items.finish(_status(completion))
        return self._ended(output, completion, len(completion.token_ids))

    async def events(self, generation: Generation) -> Events:
        yield self._event("response.created", {"response": self._response("in_progress")})
        yield self._event("response.in_progress", {"response": self._response("in_progress")})
        num_tokens = 0
        async for _, output in generation.outputs():
            [completion] = output.outputs
            num_tokens += len(completion.token_ids)
            told = [one for said in self._read(completion) for one in self._items.read(said)]
            if output.finished:
                told += self._items.finish(_status(completion))
            for kind, data in told:
                yield self._event(kind, data)
            if output.finished:
                ended = self._ended(output, completion, num_tokens)
                yield self._event(f"response.{ended['status']}", {"response": ended})

    def error_event(self, error: ApiError) -> bytes:
        """Returns the end of a stream that failed: an event with the error, then one with the failed response."""
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("error", told) + self._event("response.failed", {"response": failed})

    def _read(self, completion: CompletionOutput) -> list[Said]:
        """Returns what the new part of the completion says, and notes its log-probabilities."""
        as_ids = self._body.return_tokens_as_token_ids
        self._items.note(token_logprobs(completion, self._body.shown_logprobs(self._body.num_logprobs), as_ids))
        return self._answer.read(completion)

    def _ended(self, output: RequestOutput, completion: CompletionOutput, num_tokens: int) -> dict[str, Any]:
        """Returns the final `ResponsesResponse`, after all of the answer has been read."""
        status = _status(completion)
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        ended = self._response(status) | {
            "completed_at": now() if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if completion.finish_reason == "length" else None,
            "output": self._items.items,
            "usage": responses_usage(num_prompt, num_tokens, num_cached, self._answer.num_reasoning_tokens),
        }
        self._conversation.store(ended)
        return ended

    def _response(self, status: str) -> dict[str, Any]:
        nothing: dict[str, Any] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return self._head | nothing | {"status": status}

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number} | data, kind)


def _status(completion: CompletionOutput) -> ItemStatus:
    return "incomplete" if completion.finish_reason in ("length", "abort") else "completed"


def _text(service: Service, body: ResponsesRequest) -> str:
    """Renders the conversation with the model's template and returns the text of the prompt."""
    return service.apply_chat_template(
        body.messages(),
        field="input",
        continue_final_message=body.continued is not None,
        tools=body.tool_use().for_template(),
        variables=body.template_variables,
    )


def _read(service: Service, body: ResponsesRequest, room: PromptRoom) -> Prompt:
    if (forwarded := service.read_forwarded(body, room)) is not None:
        return forwarded
    return service.read_prompt(
        _text(service, body),
        field="input",
        add_special_tokens=bool(body.add_special_tokens),  # by default false, because the template writes them
        room=room,
    )


def _count(service: Service, body: ResponsesRequest, owner: bytes) -> int:
    body = ResponseConversation.of(body, service.responses, owner).request
    return len(service.count_tokens(_text(service, body), add_special_tokens=bool(body.add_special_tokens)))
