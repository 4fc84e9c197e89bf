"""`POST /v1/chat/completions`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import Prompt
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.answer import Answer
from jaxvllm.server.argument_check import ForcedCall
from jaxvllm.server.exchange import DONE, Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.chat_completions import ChatRequest, ChatResponse, delta_of, message_of, parts
from jaxvllm.server.protocol.fields import StreamOptions, params_of, transfer_params_of, usage, usage_of
from jaxvllm.server.protocol.logprobs import prompt_logprobs
from jaxvllm.server.protocol.request_times import times_of
from jaxvllm.server.protocol.response_format import form_given_as
from jaxvllm.server.routes.documented import STREAMED
from jaxvllm.server.service import Service
from jaxvllm.text.assistant_message import AnswerFormat, AssistantMessage
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
    model = await service.found_model(body.model)
    body = service.with_options(body)
    body.check_stream()
    service.llm.rules.check_logprobs("top_logprobs", body.num_logprobs)
    params = params_of(
        service.defaults,
        body.chosen(),
        max_tokens=service.max_tokens(body.limit),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        stream=bool(body.stream),
    )
    format = service.answer_format(body.tool_use())
    prompt = await run_in_threadpool(_read, service, body, PromptRoom.of(params))
    service.check_limit(body.limit, "max_tokens" if body.limit is body.max_tokens else "max_completion_tokens")
    answer_id, engine_id = RequestId.of(request).names("chatcmpl-", body.request_id)
    params = service.with_marks(params, format)
    room = service.reader.max_model_len - len(prompt.token_ids)
    beams = body.beams(params, room if body.limit is None else body.limit)
    with_spans = body.streaming.include_draft_spans
    [asked] = service.adapted(
        model, [body.request(engine_id, answer_id, prompt, params, beams, with_spans, body.explain)]
    )
    exchange = _Exchange(
        body, service, format, {"id": answer_id} | service.answer_head(model, body.service_tier), asked.prompt
    )
    with form_given_as(body.form_field):
        return await respond(
            request, service, [asked], exchange.whole, exchange.events, forced_calls=exchange.forced_calls
        )


class _Exchange:
    """One request, which makes the bodies of its answer."""

    def __init__(self, body: ChatRequest, service: Service, format: AnswerFormat, head: dict[str, Any], prompt: Prompt):
        self._body = body
        self._service = service
        self._format = format
        self._head = head
        self._prompt = prompt
        self._answers: dict[int, Answer] = {}
        self._prompt_ids = {"prompt_token_ids": prompt.token_list if body.return_token_ids else None}
        [last] = checked_messages(body.messages[-1:])  # all were checked when the template was rendered
        self._continued = (last["content"] or "") if body.continue_final_message else None
        self._echo = last["content"] or "" if body.echo and last["role"] == "assistant" else ""

    def forced_calls(self) -> list[ForcedCall]:
        """Returns the calls of all answers that had to be calls, as far as they have come."""
        return [call for answer in self._answers.values() for call in answer.forced_calls]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        choices = []
        for completion in output.outputs:
            answer = self._answer(completion.index)
            message = AssistantMessage.of(answer.read(completion))
            made = {"token_ids": None} | parts(self._body, completion, bool(message.calls))
            choices.append(made | {"message": message_of(self._body, message, self._echo)})
        head = self._head | {"object": "chat.completion", "prompt_logprobs": None} | self._prompt_ids
        if output.prompt_logprobs is not None:
            head["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._body.prompt_logprobs or 0)
        times = self._times(output, sum(len(completion.token_ids) for completion in output.outputs))
        told = {"choices": choices, "usage": usage_of([output], self._num_reasoning()), "metrics": times}
        return head | told | transfer_params_of([output])

    async def events(self, generation: Generation) -> Events:
        head = self._head | {"object": "chat.completion.chunk"}
        options = self._body.streaming
        num_prompt = num_tokens = num_cached = 0
        async for _, output in generation.outputs():
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            for completion in output.outputs:
                is_first = completion.index not in self._answers
                answer = self._answer(completion.index)
                if is_first:
                    # Without tools and reasoning there will be content, although it may be empty.
                    begin = {"role": "assistant", "content": self._echo or ("" if self._format.is_plain else None)}
                    first = {"index": completion.index, "delta": begin, "logprobs": None, "finish_reason": None}
                    with_ids = self._prompt_ids if self._body.return_token_ids else {}
                    so_far = self._usage_so_far(num_prompt, num_tokens, num_cached)
                    yield event(head | with_ids | {"choices": [first]} | so_far)
                num_tokens += len(completion.token_ids)
                delta = delta_of(self._body, answer.read(completion))
                if delta or completion.finish_reason or self._has_more(options):
                    made = parts(self._body, completion, answer.has_calls) | {"delta": delta}
                    so_far = self._usage_so_far(num_prompt, num_tokens, num_cached)
                    yield event(head | {"choices": [made]} | so_far)
            last = output
        if options.include_usage:
            total = usage(num_prompt, num_tokens, num_cached, self._num_reasoning())
            yield event(head | {"choices": [], "usage": total, "metrics": self._times(last, num_tokens)})
        yield DONE

    def _usage_so_far(self, num_prompt: int, num_tokens: int, num_cached: int) -> dict[str, Any]:
        """Returns the usage that a chunk tells, or null in its place, or nothing if the request has no such options."""
        if self._body.streaming.usage_in_chunks:
            return {"usage": usage(num_prompt, num_tokens, num_cached, self._num_reasoning())}
        return {"usage": None} if self._body.stream_options else {}

    def _times(self, output: RequestOutput, num_tokens: int) -> dict[str, Any] | None:
        """Returns when the only answer's tokens came, which is null if there are several or nobody asked."""
        is_shown = self._service.config.enable_per_request_metrics and (self._body.n or 1) == 1
        return times_of(output.metrics, num_tokens) if is_shown else None

    def _has_more(self, options: StreamOptions) -> bool:
        """Returns whether a chunk without text tells something."""
        more = (options.usage_in_chunks, options.include_draft_spans)
        return bool(self._body.logprobs or self._body.return_token_ids or any(more))

    def _answer(self, index: int) -> Answer:
        """Returns the answer with this index, which begins when it is first asked for."""
        if index not in self._answers:
            self._answers[index] = Answer(
                self._format, self._service, self._prompt, self._continued, self._body.shows_reasoning
            )
        return self._answers[index]

    def _num_reasoning(self) -> int | None:
        """Returns the number of tokens of the reasoning so far, or None if the model has none."""
        if self._format.reasoning is None:
            return None
        return sum(answer.num_reasoning_tokens for answer in self._answers.values())


def _read(service: Service, body: ChatRequest, room: PromptRoom) -> Prompt:
    """Renders the conversation with the model's template and returns the prompt."""
    if not body.echo and (forwarded := service.read_forwarded(body, room)) is not None:
        return forwarded
    text = service.apply_chat_template(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tool_use().for_template(),
        variables=body.template_variables,
    )
    return service.read_prompt(
        text,
        field="messages",
        add_special_tokens=bool(body.add_special_tokens),  # by default false, because the template writes them
        room=room,
    )
