"""`/v1/messages`: Anthropic's events and shapes, and its own client as judge."""

import re
from typing import Any

import pytest

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.protocol.context_management import edit as make_edits
from jaxvllm.server.protocol.messages import MessagesRequest, MessagesResponse
from tests.server.conftest import Server
from tests.server.judges import judge

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
QUESTION = "What is the capital of France?"
USER = {"role": "user", "content": QUESTION}
GREEDY: dict[str, Any] = dict(messages=[USER], temperature=0, max_tokens=40)
OURS = "jaxvllm.server.protocol.message_events.MessagesEvent"
THEIRS = "anthropic.types.RawMessageStreamEvent"


def message(server: Server, **body: Any) -> Any:
    answer = server.answer(PATH, **body)
    MessagesResponse.model_validate(answer)
    judge("anthropic.types.Message").validate_python(answer)
    return answer


def said(answer: Any) -> str:
    [block] = answer["content"]
    return block["text"]


def count(server: Server, **body: Any) -> int:
    return server.answer(COUNT, **dict(messages=[USER]) | body)["input_tokens"]


def stream(server: Server, **body: Any) -> list[Any]:
    """The data of a stream's events, each of which is as documented."""
    events = server.events(PATH, **body)
    for event in events:
        judge(OURS).validate_python(event.data)
        assert event.name == event.data["type"]
        if event.name != "ping":
            judge(THEIRS).validate_python(event.data)
    return [event.data for event in events]


def test_an_answer(server):
    answer = message(server, **GREEDY)
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "demo")
    assert answer["id"].startswith("msg_")
    assert "Paris" in said(answer)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_it_is_chat(server):
    messages = [{"role": "system", "content": "Be brief."}, USER]
    chat = server.answer("/v1/chat/completions", messages=messages, temperature=0, max_tokens=40)
    answer = message(server, **GREEDY, system="Be brief.")
    assert said(answer) == chat["choices"][0]["message"]["content"]
    usage = answer["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (dict(), {"stop_reason": "end_turn", "stop_sequence": None}),
        (dict(max_tokens=3), {"stop_reason": "max_tokens", "stop_sequence": None}),
        (dict(stop_sequences=["never", " of"]), {"stop_reason": "stop_sequence", "stop_sequence": " of"}),
    ],
)
def test_the_events_of_a_stream(server, body, reason):
    whole = message(server, **GREEDY | body)
    assert {name: whole[name] for name in reason} == reason
    events = stream(server, **GREEDY | body)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == said(whole)
    assert events[-2]["delta"] == reason | {"stop_details": None, "container": None}
    assert events[-2]["usage"] == whole["usage"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)


def test_the_last_message_is_continued(server):
    whole = said(message(server, **GREEDY))
    started = [USER, {"role": "assistant", "content": whole[:3]}]
    assert said(message(server, **GREEDY | dict(messages=started))) == whole[3:]


def test_content_in_blocks_is_joined_by_newlines(server):
    blocks = [
        {"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Who are you?", "citations": None},
    ]
    text = "Hello.\nWho are you?"
    assert count(server, messages=[{"role": "user", "content": blocks}]) == count(
        server, messages=[{"role": "user", "content": text}]
    )
    assert count(server, system=blocks) == count(server, system=text) > count(server)


def test_tokens_are_counted_as_they_will_be(server):
    answer = message(server, **GREEDY)
    assert count(server) == answer["usage"]["input_tokens"]
    assert count(server, messages=[{"role": "user", "content": "word " * 1000}]) > 512  # more than the model takes


def test_cached_tokens_are_told_apart(server):
    body = dict(messages=[USER], system="You are very patient. " * 10, max_tokens=1, cache_salt="messages")
    first, second = (message(server, **body)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= 16
    # What the first has put into the cache is what the second finds there.
    assert first["cache_creation_input_tokens"] == second["cache_read_input_tokens"]
    assert (first["input_tokens"], second["cache_creation_input_tokens"]) == (second["input_tokens"], 0)


@pytest.mark.parametrize(
    "body",
    [
        dict(thinking={"type": "disabled"}, tools=[], tool_choice={"type": "auto"}, service_tier="auto"),
        dict(
            metadata={"user_id": "me"}, top_k=None, top_p=None, stop_sequences=[], cache_control={"type": "ephemeral"}
        ),
    ],
)
def test_what_changes_nothing_is_taken(server, body):
    assert said(message(server, **GREEDY | body)) == said(message(server, **GREEDY))


def test_a_request_that_takes_too_long(server):
    body = dict(messages=[{"role": "user", "content": "Tell me a long story."}], max_tokens=400, temperature=1)
    config = ServerConfig(request_timeout=0.01)
    response = server.ask(config, PATH, **body)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
    last = server.cut_stream(PATH, **body)[-1]
    assert (last.name, last.data["type"], last.data["error"]["type"]) == ("error", "error", "timeout_error")


# ---- refusals ----

BAD: list[tuple[dict[str, Any], str]] = [
    (dict(max_tokens=None), "max_tokens"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(max_tokens="5"), "max_tokens"),
    (dict(messages=None), "messages"),
    (dict(messages=[]), "messages"),
    (dict(messages="Hello"), "messages"),
    (dict(messages=[{"role": "developer", "content": "a"}]), "messages[0].role"),
    (dict(messages=[{"role": "user"}]), "messages[0].content"),
    (dict(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (dict(messages=[USER, {"role": "user", "content": [{"type": "image"}]}]), "messages[1].content[0].type"),
    (dict(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
    (dict(messages=[{"role": "user", "content": "word " * 600}]), "max_model_len"),
    (dict(system=5), "system"),
    (dict(system=[{"type": "image"}]), "system[0].type"),
    (dict(temperature=1.1), "temperature"),
    (dict(temperature=-0.1), "temperature"),
    (dict(top_p=0), "top_p"),
    (dict(top_k=-5), "top_k"),
    (dict(stop_sequences="a"), "stop_sequences"),
    (dict(stop_sequences=[""]), "stop"),
    (dict(stream=5), "stream"),
    (dict(metadata={"name": "me"}), "metadata.name"),
    (dict(tools=[{"type": "web_search", "name": "web_search"}]), "tools[0]"),
    (
        dict(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": 5}]}),
        "context_management.edits[0]",
    ),
    (dict(context_management={"edits": [{"type": "clear_all_20250101"}]}), "context_management.edits[0].type"),
    (dict(messages=[{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]), "messages[0]"),
    (dict(tool_choice={"type": "any"}), "tool_choice"),
    (dict(cache_control={"type": "forever"}), "cache_control.type"),
    (dict(output_config={"effort": "some"}), "output_config"),
    (dict(container="x"), "container"),
    (dict(context_management={"edits": [{}]}), "context_management"),
    (dict(mcp_servers=[{}]), "mcp_servers"),
    (dict(service_tier="priority"), "service_tier"),
    (dict(n=2), "n"),
    (dict(stop=["a"]), "stop"),
]


@pytest.mark.parametrize(("body", "where"), BAD, ids=[f"{i}-{where}" for i, (_, where) in enumerate(BAD)])
def test_a_bad_field_is_named(server, body, where):
    response = server.post(PATH, **dict(messages=[USER], max_tokens=4) | body)
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert where in told["error"]["message"]


def test_a_conversation_that_is_too_long(server):
    """In Anthropic's words, by which its clients know that they must shorten the conversation."""
    for text in ("word " * 600, "word " * 10**6):
        status, error = server.error(PATH, messages=[{"role": "user", "content": text}], max_tokens=4)
        assert (status, error["type"]) == (400, "invalid_request_error")
        told = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert told is not None and int(told[1]) > int(told[2]) == 511
        assert ("counted from its" in error["message"]) == (len(text) > 10**6)


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_errors_have_anthropics_shape(server, path):
    for body, status, kind in [
        (b"{", 400, "invalid_request_error"),
        (b'{"model": "x", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}', 404, "not_found_error"),
    ]:
        if path == COUNT:
            body = body.replace(b'"max_tokens": 5, ', b"")
        response = server.client.post(path, content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert response.json()["type"] == "error"


# ---- Anthropic's client ----


def test_the_client_of_anthropic(server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        body: dict[str, Any] = dict(model="demo", messages=[USER], max_tokens=40, extra_body={"temperature": 0})
        answer = client.messages.create(**body, system="Be brief.")
        assert answer.stop_reason == "end_turn"
        expected = said(message(server, **GREEDY))
        follow_up = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Thanks!"}]
        assert client.messages.create(**body | {"messages": follow_up}).content[0].text
        with client.messages.stream(**body) as events:
            assert "".join(events.text_stream) == expected
            assert events.get_final_message().content[0].text == expected
        assert client.messages.count_tokens(model="demo", messages=[USER]).input_tokens == count(server)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**body | {"model": "claude"})
        # This model does not think, so there is nothing to show.
        thinking = client.messages.create(**body, thinking={"type": "enabled", "budget_tokens": 1024})
        assert said(thinking.model_dump()) == expected
        model = client.models.retrieve("demo")
        assert [one.id for one in client.models.list()] == [model.id] == ["demo"]
        assert (model.type, model.max_input_tokens) == ("model", 512)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_is_asked_for_has_no_other_form(server, choice):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": schema}
    format = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    choice = choice | {"disable_parallel_tool_use": True}
    answer = message(server, **GREEDY | dict(tools=[tool], tool_choice=choice, output_config={"format": format}))
    [call] = answer["content"]
    assert (call["type"], call["name"]) == ("tool_use", "get_weather")
    assert call["input"] in ({"city": "Oslo"}, {"city": "Rome"})


def test_what_claude_code_sends(server):
    """The fields and headers of Claude Code 2.1.197."""
    body = dict(
        model="demo",
        max_tokens=5,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
        messages=[USER, {"role": "system", "content": "Agents: none."}],
        tools=[
            {"name": "Write", "input_schema": {"type": "object"}, "defer_loading": True, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "bash_20250124", "name": "bash"},
        ],
        thinking={"type": "adaptive"},
        context_management={
            "edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "compact_20260112"}]
        },
        output_config={"effort": "high"},
        metadata={"user_id": "{}"},
        inference_geo="us",
        service_tier="standard_only",
        container=None,
        mcp_servers=[],
    )
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,effort-2025-11-24",
    }
    answer = server.client.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["context_management"] == {"applied_edits": []}
    assert judge("anthropic.types.beta.BetaMessage").validate_python(answer.json()).stop_details is None
    prompt = count(server, **{name: body[name] for name in ("system", "messages", "tools")})
    hosted = [tool for tool in body["tools"] if "type" not in tool]
    assert prompt == count(server, **{name: body[name] for name in ("system", "messages")}, tools=hosted)
    status, error = server.error(PATH, **body | dict(tool_choice={"type": "tool", "name": "web_search"}))
    assert status == 400 and "names 'web_search', and the tools are Write" in error["message"]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", "abc"), ({"type": "all"}, "abc"), ({"type": "thinking_turns", "value": 2}, "bc"), (None, "c")],
)
def test_thinking_of_earlier_answers_is_cleared(keep, kept):
    turns = [
        turn
        for name in "abc"
        for turn in (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": name}, {"type": "text", "text": "!"}]},
        )
    ]
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    asked = MessagesRequest.model_validate(
        dict(max_tokens=1, messages=[*turns, USER], context_management={"edits": [edit]})
    )
    edited = make_edits(asked.context_management, asked.messages, len)
    said = asked.model_copy(update={"messages": edited.messages}).conversation()
    assert "".join(one.get("reasoning", "") for one in said) == kept
    assert [one["cleared_thinking_turns"] for one in edited.applied] == ([3 - len(kept)] if len(kept) < 3 else [])


def test_a_billing_line_is_no_part_of_the_prompt(server):
    """Claude Code begins its system prompt with one, which many versions change in every request."""
    plain = count(server, system="You are an agent.")
    line = "x-anthropic-billing-header: cc_version=2.1.197.d1e; cch=%s;"
    for number in ("1", "23456789"):
        first = {"type": "text", "text": line % number}
        assert count(server, system=[first, {"type": "text", "text": "You are an agent."}]) == plain
        assert count(server, system=f"{line % number}\nYou are an agent.") == plain
        assert count(server, system=[first]) == count(server)
    assert count(server, system="No x-anthropic-billing-header: a") > count(server, system="No")


def test_the_system_may_speak_in_the_middle(server):
    """As for `/v1/chat/completions`: a text or blocks, at any place."""
    turns = [USER, {"role": "assistant", "content": "Paris."}, USER]
    for place in range(4):
        told = [*turns[:place], {"role": "system", "content": "Be brief."}, *turns[place:]]
        chat = server.answer("/v1/chat/completions", messages=told, temperature=0, max_tokens=1)
        for content in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
            ours = [*turns[:place], {"role": "system", "content": content}, *turns[place:]]
            assert count(server, messages=ours) == chat["usage"]["prompt_tokens"]


def test_what_changes_nothing_is_counted_too(server):
    body = dict(metadata={"user_id": "me"}, service_tier="auto", inference_geo="us", container=None, mcp_servers=[])
    assert count(server, **body) == count(server)
