"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import Prompt
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.answer import Answer
from jaxvllm.server.content_blocks import BlockStream, blocks_of
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.context_management import CountedContextManagement, EditedMessages, edit
from jaxvllm.server.protocol.fields import params_of
from jaxvllm.server.protocol.message_blocks import InputMessage
from jaxvllm.server.protocol.messages import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
    ending,
    messages_usage,
)
from jaxvllm.server.protocol.response_format import form_given_as
from jaxvllm.server.routes.documented import COMMON, STREAMED, as_anthropic
from jaxvllm.server.service import Service
from jaxvllm.text.assistant_message import AssistantMessage


def router(service: Service) -> APIRouter:
    """Returns a router with these endpoints."""
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=MessagesResponse, responses=as_anthropic(STREAMED))
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        model = await service.found_model(body.model)
        service.note_left_out(body.hosted_tools)
        params = params_of(
            service.defaults,
            body.chosen(service.reasoning is not None),
            max_tokens=service.max_tokens(body.max_tokens),
            logprobs=None,
            stream=bool(body.stream),
        )
        format = service.answer_format(body.tool_use())
        edited, prompt = await run_in_threadpool(_read, service, body)
        answer_id, engine_id = RequestId.of(request).names("msg_")
        [asked] = service.adapted(
            model, [body.request(engine_id, answer_id, prompt, service.with_marks(params, format))]
        )
        facts = service.llm.facts
        page_size = facts.page_size if service.llm.config.enable_prefix_caching else None
        answer = Answer(format, service, asked.prompt, body.continued, body.shows_thinking)
        applied = None if body.context_management is None else {"applied_edits": edited.applied}
        exchange = _Exchange(body, answer, model, answer_id, page_size, applied)
        with form_given_as(body.form_field):
            return await respond(
                request,
                service,
                [asked],
                exchange.whole,
                exchange.events,
                _error_event,
                forced_calls=lambda: answer.forced_calls,
            )

    @routes.post("/v1/messages/count_tokens", responses=as_anthropic(COMMON | {404: STREAMED[404]}))
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """Counts the tokens of a conversation's prompt, which may be longer than the model takes."""
        await service.found_model(body.model)
        return await run_in_threadpool(_count, service, body)

    return routes


class _Exchange:
    """One answer, which makes its bodies."""

    def __init__(
        self,
        body: MessagesRequest,
        answer: Answer,
        model: str,
        answer_id: str,
        page_size: int | None,
        applied: dict[str, Any] | None,
    ):
        """Takes the parts. `applied` says what the edits of the conversation cleared. None: it asks for no edits."""
        self._applied = applied
        self._body = body
        self._answer = answer
        self._answer_id = answer_id
        self._model = model
        self._page_size = page_size

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        [completion] = output.outputs
        content = blocks_of(AssistantMessage.of(self._answer.read(completion)))
        usage = self._usage(output, len(completion.token_ids))
        return self._message(content, usage) | ending(completion, self._answer.has_calls)

    async def events(self, generation: Generation) -> Events:
        num_tokens = 0
        stream: BlockStream | None = None
        is_pinged = False
        async for _, output in generation.outputs():
            [completion] = output.outputs
            num_tokens += len(completion.token_ids)
            if stream is None:
                stream = BlockStream()
                yield _event("message_start", message=self._message([], self._usage(output, 0)))
            told = [one for said in self._answer.read(completion) for one in stream.read(said)]
            if output.finished:
                told += stream.finish()
            for kind, data in told:
                yield _event(kind, **data)
                if not is_pinged:
                    is_pinged = True
                    yield _event("ping")
            if output.finished:
                delta = ending(completion, self._answer.has_calls)
                usage = self._usage(output, num_tokens)
                yield _event("message_delta", delta=delta, usage=usage, context_management=self._applied)
                yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._answer_id, "type": "message", "role": "assistant", "model": self._model}
        nothing = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
        return head | nothing | {"content": content, "usage": usage, "context_management": self._applied}

    def _usage(self, output: RequestOutput, num_tokens: int) -> dict[str, Any]:
        num_prompt = len(output.prompt_token_ids)
        return messages_usage(num_prompt, num_tokens, output.num_cached_tokens, self._page_size)


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind} | data, kind)


def _error_event(error: ApiError) -> bytes:
    return event(error.anthropic_body(), "error")


def _text(service: Service, body: ConversationFields, messages: Sequence[InputMessage]) -> str:
    """Renders the conversation, whose messages may have been edited, with the model's template."""
    shown = body.model_copy(update={"messages": messages})
    return service.apply_chat_template(
        shown.conversation(),
        continue_final_message=shown.continued is not None,
        tools=shown.tool_use().for_template(),
        variables=shown.template_variables,
    )


def _num_tokens(service: Service, body: ConversationFields, messages: Sequence[InputMessage]) -> int:
    return len(service.count_tokens(_text(service, body, messages), add_special_tokens=False))


def _edited(service: Service, body: ConversationFields) -> EditedMessages:
    return edit(body.context_management, body.messages, partial(_num_tokens, service, body))


def _read(service: Service, body: MessagesRequest) -> tuple[EditedMessages, Prompt]:
    if (forwarded := service.read_forwarded(body)) is not None:
        return EditedMessages(body.messages, []), forwarded
    edited = _edited(service, body)
    text = _text(service, body, edited.messages)
    # The template writes the special tokens itself.
    return edited, service.read_prompt(text, field="messages", add_special_tokens=False)


def _count(service: Service, body: CountTokensRequest) -> TokenCount:
    edited = _edited(service, body)
    size = _num_tokens(service, body, edited.messages)
    if body.context_management is None:
        return TokenCount(input_tokens=size)
    original = _num_tokens(service, body, body.messages) if edited.applied else size
    return TokenCount(input_tokens=size, context_management=CountedContextManagement(original_input_tokens=original))
