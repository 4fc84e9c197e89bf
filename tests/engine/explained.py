"""Explanations of requests, and a recount of what they tell, from nothing but the tokens and the page tables."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from jaxvllm import LLM, SamplingParams
from jaxvllm.core.explanation import Explanation
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import CompletionOutput


def explained(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[CompletionOutput]]:
    """The completions of each prompt, whose explanations agree with a recount."""
    given = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    final = [replace(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in given]
    requests = [
        llm.engine.check(str(index), prompt, one, wants_explanation=True)
        for index, (prompt, one) in enumerate(zip(prompts, final, strict=True))
    ]
    for request in requests:
        llm.engine.submit(request)
    outputs: dict[str, list[CompletionOutput]] = {}
    tables = Tables(llm)
    while llm.engine.has_work:
        for output in llm.engine.step():
            outputs[output.request_id] = output.outputs
        tables.look()
    for request in requests:
        for completion in outputs[request.request_id]:
            assert_recounted(request.prompt.token_list, completion)
            tables.check(request.request_id, completion)
    return [outputs[request.request_id] for request in requests]


class Tables:
    """What the page tables of the engine's requests had in each column at some time."""

    def __init__(self, llm: LLM):
        self._scheduler = llm.engine.replicas[0].scheduler
        self._pages: dict[str, dict[int, set[int]]] = {}

    def look(self) -> None:
        """Takes note of the tables now."""
        group = self._scheduler.cache.groups[0]
        for slot, request in self._scheduler.running():
            own = self._pages.setdefault(request.request_id, {})
            for column, page in enumerate(group.pages(slot).tolist(), int(group.first[slot])):
                own.setdefault(column, set()).add(page)

    def check(self, request_id: str, completion: CompletionOutput) -> None:
        """Asserts that keys and values went where these tables say. A request of one step was never seen here."""
        explanation = explanation_of(completion)
        size, own = explanation.page_size, self._pages.get(request_id, {})
        for step in explanation.steps:
            for position, place in places(step.writes):
                if position // size in own:
                    assert (place - position % size) // size in own[position // size]


def explanation_of(completion: CompletionOutput) -> Explanation:
    """The explanation that a completion must have, which survives the way to another process."""
    explanation = completion.explanation
    assert explanation is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(explanation), type=Explanation) == explanation
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation
    return explanation


def places(writes: Sequence[Any]) -> list[tuple[int, int]]:
    """Each position that is written, with its place."""
    return [(one.first_position + i, one.first_place + i) for one in writes for i in range(one.num_tokens)]


def assert_recounted(prompt: Sequence[int], completion: CompletionOutput) -> None:
    """Asserts that the steps of a completion, which met no stop string, add up to its tokens."""
    explanation, tokens = explanation_of(completion), completion.token_ids
    assert [token.token_id for token in explanation.prompt] == list(prompt)
    assert [token.token_id for token in explanation.tokens] == tokens
    assert explanation.finish_reason == completion.finish_reason
    size, table, at, num_tokens = explanation.page_size, dict[int, int](), 0, 0
    origins = [token.origin for token in explanation.tokens]
    last_number = -1
    for step in explanation.steps:
        batch = step.batch
        assert batch.number > last_number and 0 < batch.num_rows <= batch.bucket_rows
        assert batch.num_decode_rows <= batch.num_tokens <= batch.bucket_tokens
        last_number = batch.number
        if step.admitted is not None:
            at, table = step.admitted.num_cached_tokens, dict(enumerate(step.admitted.pages))
            assert at % size == 0 and at < len(prompt) + num_tokens
            assert list(step.admitted.pages[at // size :]) == list(step.new_pages)
        table |= dict(enumerate(step.new_pages, step.first_column))
        if step.is_dropped:
            assert not step.num_tokens
            if not step.writes:
                continue
            assert step.start == at  # its keys and values are used
            at = step.kv_length
        assert step.first_output == num_tokens
        assert step.is_dropped or step.start == at
        assert step.kv_length == step.start + step.query_length
        written = places(step.writes)
        assert [position for position, _ in written] == list(range(step.start, step.kv_length))
        assert all(place == table[position // size] * size + position % size for position, place in written)
        if step.is_dropped:
            continue
        came = origins[num_tokens : num_tokens + step.num_tokens]
        if step.kind == "decode":
            assert sum(one.num_tokens for one in step.decodes) == step.num_tokens
            position = len(prompt) + num_tokens - 1
            for one in step.decodes:
                assert (one.position, one.kv_length) == (position, position + 1)
                assert one.num_tokens - one.num_accepted in (0, 1)
                position += one.num_tokens
            assert step.num_accepted >= came.count("draft") == sum(one.num_accepted for one in step.decodes)
            assert step.num_drafted >= step.num_accepted
        at = step.start + (step.query_length if step.num_tokens or step.kind == "prefill" else 0)
        num_tokens += step.num_tokens
    if not explanation.num_steps_left_out:
        assert num_tokens == len(tokens)
        # Nothing computes the last token, unless it was forced and nothing came after it.
        assert at == len(prompt) + len(tokens) - (origins[-1:] != ["forced"])
    if completion.logprobs is not None:
        for token, ranked in zip(explanation.tokens, completion.logprobs, strict=True):
            assert token.candidates[0].token_id == token.token_id
            assert {one.token_id: one.logprob for one in token.candidates}.items() <= {
                token_id: logprob.logprob for token_id, logprob in ranked.items()
            }.items()
            assert 0 < sum(math.exp(one.logprob) for one in token.candidates) <= 1 + 1e-4
