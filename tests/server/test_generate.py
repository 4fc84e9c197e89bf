"""`POST /inference/v1/generate`: tokens in, and the same tokens out as elsewhere."""

from typing import Any

import pytest

from jaxvllm.server.protocol.generate import GenerateResponse
from tests.server.conftest import Server

PATH = "/inference/v1/generate"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def prompt(shared_server: Server) -> list[int]:
    tokens: list[int] = shared_server.answer("/tokenize", prompt="The fox saw the")["tokens"]
    return tokens


def test_tokens_and_their_log_probabilities_are_those_of_completions(server: Server, prompt: list[int]) -> None:
    asked = GREEDY | {"logprobs": 2, "prompt_logprobs": 1}
    answer = server.answer(PATH, token_ids=prompt, sampling_params=asked, return_token_ids=True)
    GenerateResponse.model_validate(answer)
    other = server.answer("/v1/completions", prompt=prompt, return_token_ids=True, **asked)
    [choice], [expected] = answer["choices"], other["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert (answer["output_mode"], "text" in choice, choice["finish_reason"]) == ("tokens", False, "length")
    assert (answer["prompt_token_ids"], answer["usage"]["total_tokens"]) == (prompt, len(prompt) + 12)
    assert answer["prompt_logprobs"] == expected["prompt_logprobs"]
    content = choice["logprobs"]["content"]
    assert [one["token_id"] for one in content] == choice["token_ids"]
    assert [one["logprob"] for one in content] == expected["logprobs"]["token_logprobs"]
    assert all(one["rank"] == 1 and len(one["top_logprobs"]) == 2 for one in content)


def test_text_comes_on_request_and_streams_have_the_same(server: Server, prompt: list[int]) -> None:
    body: dict[str, Any] = dict(token_ids=prompt, sampling_params=GREEDY | {"logprobs": 0}, output_mode="text")
    [whole] = server.answer(PATH, **body)["choices"]
    assert "".join(one["token"] for one in whole["logprobs"]["content"]) == whole["text"]
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = [event.data for event in server.events(PATH, **body)]
    assert done == "[DONE]"
    for chunk in (*chunks, last):
        GenerateResponse.model_validate(chunk)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(chunks) - 1)]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    content = [one for part in parts for one in part["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert parts[-1]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 12


def test_the_token_that_ends_an_answer_is_there(server: Server, prompt: list[int]) -> None:
    [free] = server.answer(PATH, token_ids=prompt, sampling_params=GREEDY)["choices"]
    stop = free["token_ids"][3]
    end = free["token_ids"].index(stop) + 1
    asked = GREEDY | {"stop_token_ids": [stop]}
    [choice] = server.answer(PATH, token_ids=prompt, sampling_params=asked)["choices"]
    assert (choice["token_ids"], choice["stop_reason"]) == (free["token_ids"][:end], stop)
    [eos] = server.llm.facts.eos_token_ids[:1]
    asked = GREEDY | {"allowed_token_ids": [eos]}
    [choice] = server.answer(PATH, token_ids=prompt, sampling_params=asked)["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([eos], "stop", None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**7]}, "token_ids"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"use_beam_search": True}}, "sampling_params.use_beam_search"),
        ({"sampling_params": {"max_tokens": 4096}}, "sampling_params.max_tokens"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, error = server.error(PATH, **{"token_ids": [5, 6], "sampling_params": GREEDY} | body)
    assert (status, error["param"]) == (400, param), error
