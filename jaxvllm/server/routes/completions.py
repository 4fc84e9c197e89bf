"""`POST /v1/completions`."""

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from jaxvllm.engine.prompts import Prompt
from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import DONE, Events, EventStream, answer, begin, error_event, event, unless_gone
from jaxvllm.server.generation import Generation, Job
from jaxvllm.server.protocol.completions import CompletionRequest, CompletionResponse, choice
from jaxvllm.server.protocol.fields import StreamOptions, new_id, now, params_of, usage, usage_of
from jaxvllm.server.routes.documented import STREAMED
from jaxvllm.server.service import Service

# OpenAI's own default.
MAX_TOKENS = 16


def router(service: Service) -> APIRouter:
    """The endpoint."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Goes on with a text."""
        return await _Exchange.of(service, body, request)

    return routes


class _Exchange:
    """One request and its answer."""

    def __init__(self, body: CompletionRequest, model: str, job: Job):
        self._body = body
        self._job = job
        self._head = {"id": job.request_id, "object": "text_completion", "created": now(), "model": model}

    @classmethod
    async def of(cls, service: Service, body: CompletionRequest, request: Request) -> Response:
        model = service.model_name(body.model)
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs needs the prompt's, which are not supported", param="echo")
        if body.stream_options and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        params = params_of(
            service.defaults,
            body.chosen(),
            max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            stream=bool(body.stream),
        )
        prompts = await run_in_threadpool(_read, service, body)
        request_id = body.request_id or new_id("cmpl-")
        exchange = cls(body, model, Job(request_id, prompts, params, body.priority))
        generation = await begin(request, service, exchange._job)
        if body.stream:
            return EventStream(generation, exchange._events(generation), error_event)
        async with generation:
            return answer(exchange._whole(await unless_gone(request, generation.results())))

    def _whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            choice(self._body, index * self._job.params.n + completion.index, output, completion, 0)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        for made in choices:
            made["text"] = self._echo(made["index"] // self._job.params.n) + made["text"]
        return self._head | {"choices": choices, "usage": usage_of(outputs)}

    async def _events(self, generation: Generation) -> Events:
        options = self._body.stream_options or StreamOptions()
        last: dict[int, RequestOutput] = {}
        lengths: Counter[int] = Counter()  # characters of each choice's tokens so far, shown or held back
        num_tokens = 0
        async for index, output in generation.outputs():
            last[index] = output
            for completion in output.outputs:
                number = index * self._job.params.n + completion.index
                made = choice(self._body, number, output, completion, lengths[number])
                if number not in lengths:
                    made["text"] = self._echo(index) + made["text"]
                lengths[number] += _length(completion)
                num_tokens += len(completion.token_ids)
                chunk = self._head | {"choices": [made]}
                if options.continuous_usage_stats:
                    chunk["usage"] = self._usage(last, num_tokens)
                elif options.include_usage:
                    chunk["usage"] = None
                yield event(chunk)
        if options.include_usage:
            yield event(self._head | {"choices": [], "usage": self._usage(last, num_tokens)})
        yield DONE

    def _echo(self, index: int) -> str:
        """What goes before each completion of a prompt: that prompt, when the client wants to have it back."""
        return (self._job.prompts[index].text or "") if self._body.echo else ""

    def _usage(self, last: dict[int, RequestOutput], num_tokens: int) -> dict[str, Any]:
        outputs = last.values()
        return usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            num_tokens,
            sum(output.num_cached_tokens for output in outputs),
        )


def _length(completion: CompletionOutput) -> int:
    """Characters of the tokens whose log-probabilities are told."""
    if completion.logprobs is None:
        return 0
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return sum(len(ranked[token_id].decoded_token or "") for token_id, ranked in pairs)


def _read(service: Service, body: CompletionRequest) -> list[Prompt]:
    prompts = body.prompts()
    read = []
    for index, prompt in enumerate(prompts):
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        try:
            one = service.reader.read(
                {kind: prompt, "cache_salt": body.cache_salt},
                add_special_tokens=body.add_special_tokens is not False,
            )
        except ValueError as error:
            raise ApiError(
                400, f"prompt {index}: {error}" if len(prompts) > 1 else str(error), param="prompt"
            ) from error
        if body.echo and one.text is None:
            one = Prompt(service.tokenizer.decode(one.token_ids.tolist()), one.token_ids, one.cache_salt)
        read.append(one)
    return read
