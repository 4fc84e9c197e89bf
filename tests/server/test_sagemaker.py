"""`/ping` and `/invocations`: what a container on SageMaker must answer."""

from typing import Any

import pytest

from tests.server.conftest import Server

PATH = "/invocations"
MESSAGES = [{"role": "user", "content": "Hello"}]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", dict(messages=MESSAGES, max_tokens=8)),
    ("/v1/completions", dict(prompt="Once upon a time", max_tokens=8)),
    ("/v1/responses", dict(input="Hello", max_output_tokens=8)),
]
# What two answers to one request may differ in.
OWN = ("id", "item_id", "created", "created_at", "completed_at")


def without_ids(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: without_ids(value) for name, value in told.items() if name not in OWN}
    return [without_ids(one) for one in told] if isinstance(told, list) else told


def text_of(events: list[Any]) -> str:
    """Of a stream of any of the three."""
    text = ""
    for event in events:
        if event.data != "[DONE]":
            for choice in event.data.get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            text += event.data.get("delta", "") if event.data.get("type") == "response.output_text.delta" else ""
    return text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_it_is_alive(server: Server, method: str) -> None:
    response = server.client.request(method, "/ping")
    assert (response.status_code, response.content) == (200, b"")


def test_it_is_not_while_no_request_is_taken(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxvllm.worker.async_llm.RESPONSIVE_SECONDS", -1)
    assert server.client.get("/ping").status_code == server.client.get("/ready").status_code == 503


@pytest.mark.parametrize(("path", "body"), CASES)
def test_the_field_says_which_endpoint_is_meant(server: Server, path: str, body: dict[str, Any]) -> None:
    body = body | {"temperature": 0}
    there, here = server.answer(path, **body), server.answer(PATH, **body)
    assert without_ids(here) == without_ids(there)
    events = server.events(PATH, **body)
    assert text_of(events) == text_of(server.events(path, **body)) != ""
    assert {event.name for event in events} == {event.name for event in server.events(path, **body)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (dict(), None),
        (dict(inputs="a"), None),
        (dict(prompt="a", nonsense=1), "nonsense"),
        (dict(prompt=5), "prompt"),
        (dict(prompt="a", temperature=-1), "temperature"),
        (dict(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (dict(messages=MESSAGES, prompt="a"), "prompt"),
        (dict(input=[{"role": "robot", "content": "a"}]), "input[0].role"),
        (dict(prompt="word " * 600), "prompt"),
    ],
)
def test_errors_are_those_of_that_endpoint(server: Server, body: dict[str, Any], param: str | None) -> None:
    status, error = server.error(PATH, **body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_without_such_a_field_it_says_which_there_are(server: Server) -> None:
    message = server.error(PATH, text="a")[1]["message"]
    assert message == "the body has none of messages, prompt, input: give one of them"


def test_a_body_that_is_no_object(server: Server) -> None:
    response = server.client.post(PATH, json=[1])
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("name", ["query", "path", "body"])
def test_a_wrong_field_is_named_whatever_its_name(server: Server, name: str) -> None:
    response = server.client.post(PATH, json={"prompt": "a", name: 1})
    error = response.json()["error"]
    assert (
        response.status_code == 400 and error["param"] == name and error["message"].startswith(f"{name} is not a field")
    )


def test_a_field_that_is_null_decides_nothing(server: Server) -> None:
    answer = server.answer(PATH, input="Hello", prompt=None, max_output_tokens=4)
    assert answer["object"] == "response"
