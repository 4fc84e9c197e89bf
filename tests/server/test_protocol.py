"""What a request that is wrong a million times costs: as much as one that is wrong once."""

import pytest
from pydantic import BaseModel, ValidationError

from jaxvllm.server.protocol.chat import ChatRequest
from jaxvllm.server.protocol.completions import CompletionRequest
from jaxvllm.server.protocol.messages import MessagesRequest
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


@pytest.mark.parametrize("model", [ChatRequest, TokenizeRequest])
def test_a_conversation_has_an_end(model: type[BaseModel]) -> None:
    model.model_validate({"messages": HELLO * 10_000})
    with pytest.raises(ValidationError, match="at most 10000"):
        model.model_validate({"messages": HELLO * 10_001})
