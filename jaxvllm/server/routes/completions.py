"""`POST /v1/completions`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.errors import ApiError, concerning
from jaxvllm.server.exchange import DONE, Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.completions import MAX_PROMPTS, CompletionRequest, CompletionResponse
from jaxvllm.server.protocol.fields import (
    draft_spans_of,
    explanation_of,
    params_of,
    transfer_params_of,
    usage,
    usage_of,
)
from jaxvllm.server.protocol.logprobs import Ranked, Told, completion_logprobs, prompt_logprobs
from jaxvllm.server.protocol.npy import read_npy
from jaxvllm.server.protocol.request_times import times_of
from jaxvllm.server.protocol.response_format import form_given_as
from jaxvllm.server.routes.documented import STREAMED
from jaxvllm.server.service import Service
from jaxvllm.text.prompts import PromptRoom


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues a text."""
        return await create(service, body, request)

    return routes


async def create(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answers `body`, the body of `request`."""
    model = await service.found_model(body.model)
    body = service.with_options(body)
    body.check_stream()
    params = params_of(
        service.defaults,
        body.chosen(),
        max_tokens=service.max_tokens(body.limit),
        logprobs=body.logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        stream=bool(body.stream),
    )
    prompts = await run_in_threadpool(_read, service, body, PromptRoom.of(params))
    service.check_limit(body.max_tokens, "max_tokens")
    answer_id, engine_id = RequestId.of(request).names("cmpl-", body.request_id)
    ids = [engine_id] if len(prompts) == 1 else [f"{engine_id}-{index}" for index in range(len(prompts))]
    beams = body.beams(params, body.limit)
    with_spans = body.streaming.include_draft_spans
    asked = [
        body.request(name, answer_id, prompt, params, beams, with_spans, body.explain)
        for name, prompt in zip(ids, prompts, strict=True)
    ]
    asked = service.adapted(model, asked)
    exchange = _Exchange(service, body, model, asked, answer_id)
    with form_given_as(body.form_field):
        return await respond(request, service, asked, exchange.whole, exchange.events)


class _Exchange:
    """One request, which makes the bodies of its answer."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        model: str,
        asked: Sequence[GenerationRequest],
        answer_id: str,
    ):
        self._service = service
        self._body = body
        self._asked = asked
        self._n = asked[0].params.n
        self._head = {"id": answer_id, "object": "text_completion"} | service.answer_head(model, body.service_tier)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(index, completion, self._tokens(completion, output), 0, True) | self._of_prompt(output)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        times = self._times(outputs[0], sum(len(completion.token_ids) for completion in outputs[0].outputs))
        told = {"choices": choices, "usage": usage_of(outputs), "metrics": times}
        return self._head | told | transfer_params_of(outputs)

    async def events(self, generation: Generation) -> Events:
        options = self._body.streaming
        first: dict[int, RequestOutput] = {}  # the first output of each prompt
        last: dict[int, RequestOutput] = {}
        lengths: dict[int, int] = {}  # characters of each choice's tokens so far, whether sent or held back
        num_tokens = 0
        async for index, output in generation.outputs():
            last[index] = output
            first.setdefault(index, output)
            for completion in output.outputs:
                number = index * self._n + completion.index
                is_first = number not in lengths
                tokens = self._tokens(completion, first[index] if is_first else None)
                made = self._choice(index, completion, tokens, lengths.get(number, 0), is_first)
                if is_first:
                    made |= self._of_prompt(first[index])
                lengths[number] = lengths.get(number, 0) + sum(len(text) for _, text, _ in tokens)
                num_tokens += len(completion.token_ids)
                chunk = self._head | {"choices": [made]}
                if options.usage_in_chunks:
                    chunk["usage"] = self._usage(last, num_tokens)
                elif options.include_usage:
                    chunk["usage"] = None
                yield event(chunk)
        if options.include_usage:
            total = {"usage": self._usage(last, num_tokens), "metrics": self._times(last[0], num_tokens)}
            yield event(self._head | {"choices": []} | total)
        yield DONE

    def _tokens(self, completion: CompletionOutput, first: RequestOutput | None) -> list[Told]:
        """Returns the tokens with log-probabilities for a choice: the new ones, after the echoed prompt of `first`."""
        if completion.logprobs is None:
            return []
        pairs: list[tuple[int, Ranked | None]] = []
        if first is not None and self._body.echo:
            assert first.prompt_logprobs is not None, "an echo scores the prompt, and the first output has the scores"
            pairs += zip(first.prompt_token_ids, first.prompt_logprobs, strict=True)
        pairs += zip(completion.token_ids, completion.logprobs, strict=True)
        return [
            (
                one,
                self._service.tokenizer.token_text(one) if ranked is None else ranked[one].decoded_token or "",
                ranked,
            )
            for one, ranked in pairs
        ]

    def _choice(
        self, index: int, completion: CompletionOutput, tokens: list[Told], offset: int, is_first: bool
    ) -> dict[str, Any]:
        """Returns a `CompletionChoice` with the new part for prompt `index`, `offset` characters into the choice."""
        body = self._body
        logprobs = None
        if completion.logprobs is not None:
            count = body.shown_logprobs(body.logprobs)
            logprobs = completion_logprobs(tokens, count, body.return_tokens_as_token_ids, offset)
        echo = (self._asked[index].prompt.text or "") if body.echo and is_first else ""
        made: dict[str, Any] = {
            "index": index * self._n + completion.index,
            "text": echo + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.return_token_ids:
            made["token_ids"] = completion.token_ids
        elif not body.stream:
            made["token_ids"] = None
        return made | draft_spans_of(completion) | explanation_of(completion)

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the fields about the prompt, which a choice has once."""
        # A whole answer has all fields, as vLLM's has.
        made: dict[str, Any] = {} if self._body.stream else {"prompt_token_ids": None, "prompt_logprobs": None}
        if self._body.return_token_ids:
            made["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._body.prompt_logprobs)
        return made

    def _times(self, output: RequestOutput, num_tokens: int) -> dict[str, Any] | None:
        """Returns when the only completion's tokens came, which is null if there are several or nobody asked."""
        is_shown = self._service.config.enable_per_request_metrics and len(self._asked) * self._n == 1
        return times_of(output.metrics, num_tokens) if is_shown else None

    def _usage(self, last: dict[int, RequestOutput], num_tokens: int) -> dict[str, Any]:
        outputs = last.values()
        return usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            num_tokens,
            sum(output.num_cached_tokens for output in outputs),
        )


def _read(service: Service, body: CompletionRequest, room: PromptRoom) -> list[Prompt]:
    prompts = body.prompts()
    if body.embeds:
        return _read_embeds(service, body, prompts, room)
    if body.echo and service.reader.tokenizer is None:
        raise ApiError(400, "echo needs a tokenizer, and this model has none: leave it out", param="echo")
    if not body.echo and (forwarded := service.read_forwarded(body, room)) is not None:
        if len(prompts) > 1:
            field = "kv_transfer_params.prompt_token_ids"
            raise ApiError(
                400, f"{field} is one prompt, and prompt has {len(prompts)}: send several requests", param=field
            )
        return [forwarded]
    adds = body.add_special_tokens is not False
    read = service.read_prompts(prompts, field="prompt", add_special_tokens=adds, room=room)
    if not body.echo:
        return read
    return [
        one if one.text is not None else replace(one, text=service.tokenizer.decode(one.token_list)) for one in read
    ]


def _read_embeds(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]], room: PromptRoom
) -> list[Prompt]:
    """Returns the prompts of embeddings, and after them those of text or tokens."""
    field = "prompt_embeds"
    if body.echo:
        raise ApiError(
            400, f"echo tells the text of a prompt, and {field} has none: leave one of them out", param="echo"
        )
    if len(body.embeds) > MAX_PROMPTS:
        raise ApiError(400, f"{field} has {len(body.embeds)} prompts, and {MAX_PROMPTS} are the most", param=field)
    with concerning(field):
        read = [service.reader.read({field: read_npy(text, field)}, room=room) for text in body.embeds]
    adds = body.add_special_tokens is not False
    return read + service.read_prompts(prompts, field="prompt", add_special_tokens=adds, room=room)
