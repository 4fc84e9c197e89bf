"""What OpenAI's and Anthropic's clients send along is accepted, or refused by its name, at every endpoint alike."""

import re
from typing import Any

import msgspec
import pytest

from jaxvllm.core.request import GenerationRequest

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": dict(messages=MESSAGES, max_tokens=2),
    "/v1/responses": dict(input="Hello", max_output_tokens=2),
    "/v1/messages": dict(messages=MESSAGES, max_tokens=2),
    "/v1/completions": dict(prompt="Hello", max_tokens=2),
}
CHAT, RESPONSES, MESSAGES_PATH, COMPLETIONS = BODIES
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *((path, dict(service_tier="auto")) for path in BODIES),
    *((path, dict(user="u-1")) for path in (CHAT, RESPONSES, COMPLETIONS)),
    *((path, dict(metadata={"run": "5"})) for path in (CHAT, RESPONSES, COMPLETIONS)),
    *((path, dict(safety_identifier="u-1")) for path in (CHAT, RESPONSES, COMPLETIONS)),
    *((path, dict(prompt_cache_key="u-1")) for path in (CHAT, RESPONSES, COMPLETIONS)),
    *((path, dict(store=False)) for path in (CHAT, RESPONSES)),
    (RESPONSES, dict(store=True)),
    *((path, dict(parallel_tool_calls=True)) for path in (CHAT, RESPONSES)),
    *((path, dict(service_tier=tier)) for path in (CHAT, RESPONSES, COMPLETIONS) for tier in ("default", "flex")),
    *((path, dict(user=5, metadata=[{"run": 5}])) for path in (CHAT, COMPLETIONS)),
    *((path, dict(chat_id="c", num_ctx=4096)) for path in (CHAT, RESPONSES, COMPLETIONS)),
    *((path, dict(stream=True, stream_options={"include_obfuscation": True})) for path in (CHAT, COMPLETIONS)),
    *((path, dict(truncate_prompt_tokens=2, truncation_side="left")) for path in (CHAT, COMPLETIONS)),
    (CHAT, dict(verbosity="medium")),
    (CHAT, dict(verbosity="low")),
    *((CHAT, dict(prompt_cache_retention=kept)) for kept in ("in_memory", "24h")),
    (CHAT, dict(prompt_cache_options={"mode": "implicit", "ttl": "30m"})),
    (RESPONSES, dict(text={"format": {"type": "text"}, "verbosity": "medium"})),
    (RESPONSES, dict(prompt_cache_retention="in_memory")),
    (MESSAGES_PATH, dict(metadata={"user_id": "u-1"})),
    (MESSAGES_PATH, dict(thinking={"type": "disabled"})),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, dict(service_tier="gold"), "service_tier") for path in BODIES),
    *((path, dict(guided_json={}), "guided_json") for path in BODIES),
    *((path, dict(store=True), "store") for path in BODIES if path != RESPONSES),
    (RESPONSES, dict(store="yes"), "store"),
    *((path, dict(suffix="end"), "suffix") for path in (CHAT, RESPONSES, COMPLETIONS)),
    *((path, dict(truncation_side="right"), "truncation_side") for path in (CHAT, COMPLETIONS)),
    (CHAT, dict(verbosity="loud"), "verbosity"),
    (RESPONSES, dict(text={"verbosity": "loud"}), "text.verbosity"),
    (COMPLETIONS, dict(parallel_tool_calls=True), "parallel_tool_calls"),
    (COMPLETIONS, dict(reasoning_effort="low"), "reasoning_effort"),
    (COMPLETIONS, dict(verbosity="low"), "verbosity"),
]


@pytest.mark.parametrize(("path", "fields"), ACCEPTED, ids=[f"{path}-{next(iter(b))}" for path, b in ACCEPTED])
def test_is_accepted(server: Any, path: str, fields: dict[str, Any]) -> None:
    assert server.post(path, **BODIES[path], **fields).status_code == 200


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[f"{path}-{param}" for path, _, param in REFUSED])
def test_is_refused_by_name(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    status, error = server.error(path, **BODIES[path], **fields)
    assert status == 400 and param in error["message"]
    if path != MESSAGES_PATH:  # Anthropic's errors have no such field
        assert error["param"] == param


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("guided_json", 'use structured_outputs: {"json": ...}'),
        ("enable_thinking", 'use chat_template_kwargs: {"enable_thinking": ...}'),
        ("max_new_tokens", "use max_tokens"),
    ],
)
def test_a_field_of_other_servers_is_told_by_what_it_is_here(server: Any, field: str, hint: str) -> None:
    _, error = server.error(CHAT, **BODIES[CHAT], **{field: True})
    assert error["message"] == f"{field} is not a field that is supported here: {hint}"


@pytest.mark.parametrize(
    "path", ["pooling", "rerank", "score", "images/generations", "audio/transcriptions", "moderations", "files"]
)
def test_what_the_server_has_not_is_a_clear_404(server: Any, path: str) -> None:
    status, error = server.error(f"/v1/{path}", input="Hello", model="demo")
    assert (status, error["type"]) == (404, "not_found_error")
    assert re.fullmatch(rf"there is no endpoint /v1/{path}: .+ \(GET /docs lists all\)", error["message"])


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/images/generations", "this model reads text only"),
        ("/embeddings", "did you mean /v1/embeddings?"),
        ("/v2/rerank", "classes and scores of texts are not supported yet"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        (
            "/nothing/like/it",
            "there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/models",
        ),
    ],
)
def test_what_exists_is_named_whatever_the_body_is(server: Any, path: str, told: str) -> None:
    answer = server.client.post(path, files={"file": b"sound"})
    assert answer.status_code == 404 and told in answer.json()["error"]["message"]


def test_a_method_that_an_endpoint_has_not(server: Any) -> None:
    answer = server.client.put("/v1/chat/completions", content=b"x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/v1/chat/completions does not take PUT: use POST"


IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    [
        (CHAT, dict(messages=[{"role": "user", "content": [IMAGE]}]), "messages[0].content[0]"),
        (RESPONSES, dict(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0]"),
        (MESSAGES_PATH, dict(messages=[{"role": "user", "content": [{"type": "image"}]}]), "messages[0].content[0]"),
    ],
)
def test_images_are_refused_in_one_way(server: Any, path: str, fields: dict[str, Any], part: str) -> None:
    status, error = server.error(path, **BODIES[path] | fields)
    assert status == 400
    assert error["message"].startswith(part) and error["message"].endswith("': this model reads text only")


def test_an_operators_limit_holds_for_every_request(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--override-generation-config '{"max_new_tokens": 3}'` tells the engine, and the engine tells the server."""
    limited = msgspec.structs.replace(server.llm.facts, default_max_tokens=3, most_tokens=3)
    monkeypatch.setattr(server.llm, "_facts", limited)
    for path, body in BODIES.items():
        asked = {name: 50 if "tokens" in name else value for name, value in body.items()} | {"temperature": 0}
        usage = server.answer(path, **asked)["usage"]
        assert 3 == usage.get("completion_tokens", usage.get("output_tokens")), path
    open_ended = server.answer(CHAT, messages=[{"role": "user", "content": "Tell me about a fox."}])
    assert open_ended["usage"]["completion_tokens"] == 3


def test_a_models_own_limit_is_only_the_default(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "_facts", msgspec.structs.replace(server.llm.facts, default_max_tokens=3))
    story = dict(messages=[{"role": "user", "content": "Tell me about a fox."}], temperature=0)
    assert server.answer(CHAT, **story)["usage"]["completion_tokens"] == 3
    assert server.answer(CHAT, **story, max_tokens=7)["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("path", BODIES)
def test_a_session_comes_from_the_body_or_else_from_the_header(
    server: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[str | None] = []
    enqueue = server.llm.enqueue

    def spy(request: GenerationRequest) -> Any:
        sessions.append(request.session_id)
        return enqueue(request)

    monkeypatch.setattr(server.llm, "enqueue", spy)
    for fields, headers in (
        ({}, {}),
        ({}, {"X-Session-ID": "talk-1"}),
        ({}, {"X-Session-ID": ""}),
        ({"session_id": "talk-2"}, {"X-Session-ID": "talk-1"}),
    ):
        assert server.client.post(path, json=BODIES[path] | fields, headers=headers).status_code == 200
    assert sessions == [None, "talk-1", None, "talk-2"]
    status, error = server.error(path, **BODIES[path], session_id="x" * 257)
    assert status == 400 and "session_id" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_tokens_that_a_proxy_passes_on_are_the_prompt(server: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    enqueue = server.llm.enqueue

    def spy(request: GenerationRequest) -> Any:
        prompts.append(request.prompt.token_list)
        return enqueue(request)

    monkeypatch.setattr(server.llm, "enqueue", spy)
    server.answer(path, **BODIES[path], kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
    assert prompts == [[5, 6, 7]]
    for wrong, told in (
        ([], "prompt_token_ids"),
        ([5, "a"], "prompt_token_ids[1]"),
        ([10**6], "vocabulary"),
        ([True], "[0]"),
    ):
        status, error = server.error(path, **BODIES[path], kv_transfer_params={"prompt_token_ids": wrong})
        assert status == 400 and told in error["message"], error
