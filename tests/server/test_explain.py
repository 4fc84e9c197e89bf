"""`explain`: an answer's choices end with what the engine did for them, whole and streamed."""

from typing import Any

import msgspec
import pytest

from jaxvllm.core.explanation import Explanation
from jaxvllm.engine.outputs import CompletionOutput
from tests.engine.explained import assert_recounted
from tests.server.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 12, "logprobs": 2},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "logprobs": True, "top_logprobs": 2},
}


def explanation(choice: dict[str, Any]) -> Explanation:
    return msgspec.convert(choice["explanation"], Explanation)


@pytest.mark.parametrize("path", BODIES)
def test_every_choice_is_explained(server: Server, path: str) -> None:
    body = BODIES[path] | {"n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    whole = server.answer(path, **body, explain=True)
    prompt = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    for choice in whole["choices"]:
        told = explanation(choice)
        assert [token.token_id for token in told.prompt] == prompt
        assert [token.token_id for token in told.tokens] == choice["token_ids"]
        assert all(len(token.candidates) >= 2 for token in told.tokens)
        assert sum(step.num_tokens for step in told.steps) == 12
    chunks = [event.data for event in server.events(path, **body, explain=True)[:-1]]
    told_at = [(c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"] if "explanation" in c]
    assert sorted(told_at) == [(0, "length"), (1, "length")]  # once, at the end of each
    ends = {c["index"]: explanation(c) for chunk in chunks for c in chunk["choices"] if "explanation" in c}
    for choice in whole["choices"]:  # the same tokens, of a seed
        assert [token.token_id for token in ends[choice["index"]].tokens] == choice["token_ids"]
    plain = server.answer(path, **body)
    assert not any("explanation" in choice for choice in plain["choices"])


def test_what_is_told_over_http_adds_up(server: Server) -> None:
    body = {"prompt": "Which day comes after Friday?" * 4, "max_tokens": 20, "temperature": 0, "explain": True}
    [choice] = server.answer(COMPLETIONS, **body, return_token_ids=True)["choices"]
    told = explanation(choice)
    completion = CompletionOutput(
        0, choice["text"], choice["token_ids"], finish_reason=choice["finish_reason"], explanation=told
    )
    assert_recounted([token.token_id for token in told.prompt], completion)
    assert not any(token.candidates for token in told.tokens)  # it did not ask for log-probabilities


def test_a_search_cannot_be_explained(server: Server) -> None:
    status, error = server.error(COMPLETIONS, prompt="a", use_beam_search=True, n=2, temperature=0, explain=True)
    assert (status, error["param"]) == (400, "explain")
    assert "cannot be explained" in error["message"]
