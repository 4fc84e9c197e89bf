"""`POST /inference/v1/generate`: tokens in and tokens out, for trainers and other servers, in vLLM's shape."""

from typing import Any

from fastapi import APIRouter, Request, Response

from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.server.exchange import DONE, Events, event, respond
from jaxvllm.server.generation import Generation
from jaxvllm.server.http.request_id import RequestId
from jaxvllm.server.protocol.fields import now, transfer_params_of, usage, usage_of
from jaxvllm.server.protocol.generate import GenerateRequest, GenerateResponse, generate_choice
from jaxvllm.server.protocol.logprobs import prompt_logprobs
from jaxvllm.server.routes.documented import STREAMED
from jaxvllm.server.service import Service
from jaxvllm.text.prompts import PromptRoom


def router(service: Service) -> APIRouter:
    """Returns a router with this endpoint."""
    routes = APIRouter(tags=["Tokens"])

    @routes.post("/inference/v1/generate", response_model=GenerateResponse, responses=STREAMED)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continues tokens, and answers with tokens, as vLLM's endpoint does.

        No template and no tokenizer is between the client and the model. The answer has every token that was drawn, the
        one that ended it included. Sampling parameters that are left out have the defaults of `SamplingParams`, and not
        those that the checkpoint recommends.
        """
        return await _create(service, body, request)

    return routes


async def _create(service: Service, body: GenerateRequest, request: Request) -> Response:
    model = await service.found_model(body.model)
    body.check()
    limit = body.sampling_params.max_tokens
    params = body.params(service.max_tokens(limit))
    prompt = service.read_prompt(
        body.token_ids, field="token_ids", add_special_tokens=False, room=PromptRoom.of(params)
    )
    service.check_limit(limit, "sampling_params.max_tokens")
    answer_id, engine_id = RequestId.of(request).names("generate-tokens-", body.request_id)
    asked = service.adapted(model, [body.request(engine_id, answer_id, prompt, params)])
    head: dict[str, Any] = {"request_id": answer_id, "output_mode": body.output_mode}

    def whole(outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        scored = body.sampling_params.prompt_logprobs
        return (
            head
            | {
                "model": model,
                "created": now(),
                "choices": [generate_choice(completion, body) for completion in output.outputs],
                "usage": usage_of(outputs),
                "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
                "prompt_logprobs": None if scored is None else prompt_logprobs(output.prompt_logprobs, scored),
            }
            | transfer_params_of(outputs)
        )

    async def events(generation: Generation) -> Events:
        streaming = body.stream_options
        num_tokens, num_cached, is_first = 0, 0, True
        async for _, output in generation.outputs():
            num_cached = output.num_cached_tokens
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
                chunk = head | {"choices": [generate_choice(completion, body)]}
                if is_first and body.return_token_ids:
                    chunk["prompt_token_ids"] = output.prompt_token_ids
                if streaming is not None and streaming.usage_in_chunks:
                    chunk["usage"] = usage(len(body.token_ids), num_tokens, num_cached)
                is_first = False
                yield event(chunk)
        if streaming is not None and streaming.include_usage:
            yield event(head | {"choices": [], "usage": usage(len(body.token_ids), num_tokens, num_cached)})
        yield DONE

    return await respond(request, service, asked, whole, events)
