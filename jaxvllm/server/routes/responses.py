"""`POST /v1/responses`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import Prompt
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.fields import new_id, now, params_of
from jaxvllm.server.protocol.responses import (
    ResponsesRequest,
    ResponsesResponse,
    echoed,
    responses_usage,
    token_logprobs,
)
from jaxvllm.server.routes.documented import STREAMED
from jaxvllm.server.service import Service
from jaxvllm.text.prompts import PromptRoom


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/responses", response_model=ResponsesResponse, responses=STREAMED)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a text or a conversation. Nothing is stored: the next request must have the whole conversation."""
        return await create(service, body, request)

    return routes


async def create(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """Answers `body`, the body of `request`."""
    model = service.model_name(body.model)
    body.check_stream()
    service.llm.rules.check_logprobs("top_logprobs", body.num_logprobs)
    params = params_of(
        service.defaults,
        body.chosen(),
        max_tokens=service.max_tokens(body.max_output_tokens),
        logprobs=body.num_logprobs,
        stream=bool(body.stream),
    )
    prompt = await run_in_threadpool(_read, service, body, PromptRoom.of(params))
    service.check_room(prompt, body.max_output_tokens, "max_output_tokens")
    answer_id, engine_id = RequestId.of(request).names("resp_", body.request_id)
    exchange = _Exchange(body, model, params, answer_id)
    asked = [body.request(engine_id, prompt, params)]
    return await respond(request, service, asked, exchange.whole, exchange.events, exchange.error_event)


class _Exchange:
    """One answer, which makes its bodies: a response with one message of one text."""

    def __init__(self, body: ResponsesRequest, model: str, params: SamplingParams, answer_id: str):
        self._item_id = new_id("msg_")
        self._num_logprobs = body.shown_logprobs(body.num_logprobs)
        self._as_ids = body.return_tokens_as_token_ids
        self._head = echoed(body) | {
            "id": answer_id,
            "object": "response",
            "created_at": now(),
            "model": model,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        self._num_events = 0
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        [completion] = output.outputs
        self._add(completion)
        return self._ended(output, completion, len(completion.token_ids))

    async def events(self, generation: Generation) -> Events:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        item = self._item("in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._text_event("response.content_part.added", part=self._part())
        num_tokens = 0
        async for _, output in generation.outputs():
            [completion] = output.outputs
            num_tokens += len(completion.token_ids)
            logprobs = self._add(completion)
            if completion.text or logprobs:
                yield self._text_event("response.output_text.delta", delta=completion.text, logprobs=logprobs)
            if output.finished:
                ended = self._ended(output, completion, num_tokens)
                yield self._text_event("response.output_text.done", text=self._text, logprobs=self._logprobs)
                yield self._text_event("response.content_part.done", part=self._part())
                yield self._event("response.output_item.done", output_index=0, item=ended["output"][0])
                yield self._event(f"response.{ended['status']}", response=ended)

    def error_event(self, error: ApiError) -> bytes:
        """Returns the end of a stream that failed: an event with the error, then one with the failed response."""
        told = self._event("error", code=error.code or error.type, message=error.message, param=error.param)
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return told + self._event("response.failed", response=failed)

    def _add(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Adds the new part of the answer, and returns its log-probabilities."""
        logprobs = token_logprobs(completion, self._num_logprobs, self._as_ids)
        self._text += completion.text
        self._logprobs += logprobs
        return logprobs

    def _ended(self, output: RequestOutput, completion: CompletionOutput, num_tokens: int) -> dict[str, Any]:
        """Returns the final `ResponsesResponse`, after all parts have been added."""
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        return self._response(status) | {
            "completed_at": now() if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(status)],
            "usage": responses_usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens),
        }

    def _response(self, status: str) -> dict[str, Any]:
        nothing: dict[str, Any] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return self._head | nothing | {"status": status}

    def _item(self, status: str) -> dict[str, Any]:
        head = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return head | {"content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _text_event(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number} | data, kind)


def _read(service: Service, body: ResponsesRequest, room: PromptRoom) -> Prompt:
    """Renders the conversation with the model's template and returns the prompt."""
    text = service.apply_chat_template(
        body.messages(), field="input", continue_final_message=body.continues, variables=body.chat_template_kwargs
    )
    return service.read_prompt(
        text,
        field="input",
        add_special_tokens=bool(body.add_special_tokens),  # by default false, because the template writes them
        room=room,
    )
