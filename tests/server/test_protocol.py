"""What a request that is wrong a million times costs: as much as one that is wrong once."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.server.protocol.chat_completions import ChatRequest
from jaxvllm.server.protocol.completions import CompletionRequest
from jaxvllm.server.protocol.fields import SamplingFields
from jaxvllm.server.protocol.generate import GenerateRequest
from jaxvllm.server.protocol.messages import CountTokensRequest, MessagesRequest
from jaxvllm.server.protocol.responses import ResponsesRequest
from jaxvllm.server.protocol.tokenization import DetokenizeRequest, TokenizeRequest

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, dict(prompt=[{}] * 1000)),
        (CompletionRequest, dict(prompt=[[{}] * 1000] * 1000)),
        (CompletionRequest, dict(prompt=["a", *[1] * 1000])),
        (CompletionRequest, dict(prompt="a", stop=[1] * 1000)),
        (CompletionRequest, dict(prompt="a", stop_token_ids=["1"] * 1000)),
        (ChatRequest, dict(messages=[1] * 1000)),
        (MessagesRequest, dict(messages=[1] * 1000, max_tokens=1)),
        (MessagesRequest, dict(messages=[{"role": "user", "content": [1] * 1000}], max_tokens=1)),
        (MessagesRequest, dict(messages=HELLO, stop_sequences=[1] * 1000, max_tokens=1)),
        (ResponsesRequest, dict(input=[1] * 1000)),
        (ResponsesRequest, dict(input=[{"role": "user", "content": [1] * 1000}])),
        (TokenizeRequest, dict(messages=[1] * 1000)),
        (DetokenizeRequest, dict(tokens=["a"] * 1000)),
    ],
)
def test_errors_do_not_multiply(model: type[BaseModel], body: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() <= 5  # a form of the field each


REQUESTS = (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of all lists in one of pydantic's core schemas."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for name, part in schema.items():
            if name not in ("metadata", "json_schema_input_schema"):  # which say nothing of what is checked
                yield from lists_of(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from lists_of(part)


@pytest.mark.parametrize("model", REQUESTS)
def test_no_list_makes_more_than_one_error(model: type[BaseModel]) -> None:
    """Of a list whose items may be wrong: 2.8 million of them took 20 s. `MAX_NAMES_OF_ONE` bounds those of objects."""
    lists = list(lists_of(model.__pydantic_core_schema__))
    assert lists
    for found in lists:
        assert found.get("fail_fast") or found["items_schema"]["type"] == "any", found


def test_what_is_refused_is_not_written_out() -> None:
    """Only as much of it as is shown, of a million items."""

    class Counted(list[int]):
        seen = 0

        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                self.seen += 1
                yield item

    refused = Counted(range(1_000_000))
    with pytest.raises(ValidationError, match=r"\[0, 1, 2, .*\.\.\. is not supported"):
        CompletionRequest.model_validate({"prompt": "a", "logits_processors": [refused]})
    assert 0 < refused.seen < 100
    with pytest.raises(ValidationError, match=r'\{"a": "b"\} is not supported'):
        CompletionRequest.model_validate({"prompt": "a", "vllm_xargs": {"a": "b"}})


@pytest.mark.parametrize("model", [ChatRequest, TokenizeRequest])
def test_a_conversation_has_an_end(model: type[BaseModel]) -> None:
    model.model_validate({"messages": HELLO * 10_000})
    with pytest.raises(ValidationError, match="at most 10000"):
        model.model_validate({"messages": HELLO * 10_001})


def test_every_sampling_parameter_is_a_field() -> None:
    """A parameter is declared in `SamplingParams` and once for HTTP; no other place on the host lists them."""
    has_other_form = {"max_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind"}
    is_for_python = {"flat_logprobs", "skip_clone", "extra_args"}
    declared = {field.name for field in fields(SamplingParams)}
    assert has_other_form | is_for_python <= declared
    assert declared - has_other_form - is_for_python <= SamplingFields.model_fields.keys()
