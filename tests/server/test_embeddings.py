"""`POST /v1/embeddings`."""

import base64
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxvllm.server.protocol.embeddings import EmbeddingResponse
from tests.server.conftest import Server

TEXTS = ["Once upon a time", "Long ago, in a castle", "x"]


def vectors(server: Server, **body: Any) -> NDArray[np.float64]:
    answer = server.answer("/v1/embeddings", **body)
    EmbeddingResponse.model_validate(answer)
    assert answer["object"] == "list" and answer["id"].startswith("embd-")
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]])


def tokens_of(server: Server, text: str) -> list[int]:
    tokens: list[int] = server.answer("/tokenize", prompt=text)["tokens"]
    return tokens


def test_inputs_may_be_texts_or_tokens(server: Server) -> None:
    several = vectors(server, input=TEXTS)
    assert several.shape[0] == 3
    np.testing.assert_allclose(np.linalg.norm(several, axis=1), 1, atol=1e-6)
    assert len({tuple(one) for one in several.round(3)}) == 3
    np.testing.assert_allclose(vectors(server, input=TEXTS[0])[0], several[0], atol=1e-5)
    ids = [tokens_of(server, text) for text in TEXTS]
    np.testing.assert_allclose(vectors(server, input=ids), several, atol=1e-5)
    np.testing.assert_allclose(vectors(server, input=ids[0])[0], several[0], atol=1e-5)
    answer = server.answer("/v1/embeddings", input=TEXTS)
    assert answer["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}


def test_base64_is_the_same_numbers(server: Server) -> None:
    answer = server.answer("/v1/embeddings", input=TEXTS, encoding_format="base64")
    EmbeddingResponse.model_validate(answer)
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    np.testing.assert_allclose(decoded, vectors(server, input=TEXTS), atol=1e-5)


def test_a_conversation_is_a_text_by_the_template(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = server.answer("/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    np.testing.assert_allclose(vectors(server, messages=messages), vectors(server, input=tokens), atol=1e-5)
    with_prompt = vectors(server, messages=messages, add_generation_prompt=True)
    tokens = server.answer("/tokenize", messages=messages)["tokens"]
    np.testing.assert_allclose(with_prompt, vectors(server, input=tokens), atol=1e-5)


def test_the_last_tokens_of_a_long_text_are_kept_on_demand(server: Server) -> None:
    tokens = tokens_of(server, "a " * 700)
    status, error = server.error("/v1/embeddings", input=tokens)
    assert status == 400 and "maximum context length is 512" in error["message"]
    kept = vectors(server, input=tokens, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(kept, vectors(server, input=tokens[-512:]), atol=1e-5)
    assert not np.allclose(kept, vectors(server, input=tokens, truncate_prompt_tokens=5))


def test_a_vector_without_activation_has_its_own_length(server: Server) -> None:
    raw, normalized = vectors(server, input=TEXTS, use_activation=False), vectors(server, input=TEXTS)
    assert (np.linalg.norm(raw, axis=1) > 2).all()
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), normalized, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 3}, "priority"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, error = server.error("/v1/embeddings", **body)
    assert status == (404 if param == "model" else 400)
    assert error["param"] == param, error
