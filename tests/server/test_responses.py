"""`/v1/responses`: OpenAI's events and shapes, and its own client as judge."""

import asyncio
import itertools
from typing import Any

import pytest
from pydantic import TypeAdapter

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.protocol.response_events import ResponsesEvent
from jaxvllm.server.protocol.responses import LOGPROBS, ResponsesResponse
from tests.server.conftest import Server
from tests.server.judges import judge

PATH = "/v1/responses"
INPUT = "What is the capital of France?"
GREEDY: dict[str, Any] = dict(input=INPUT, temperature=0, max_output_tokens=40)
EVENTS = TypeAdapter(ResponsesEvent)


def respond(server: Server, **body: Any) -> Any:
    answer = server.answer(PATH, **body)
    ResponsesResponse.model_validate(answer)
    judge("openai.types.responses.Response").validate_python(answer)
    return answer


def said(answer: Any) -> str:
    return answer["output"][0]["content"][0]["text"]


def prompt_of(server: Server, **body: Any) -> int:
    return respond(server, **GREEDY | dict(max_output_tokens=1) | body)["usage"]["input_tokens"]


def stream(server: Server, **body: Any) -> list[Any]:
    """The data of a stream's events, each of which is in order and as documented."""
    events = server.events(PATH, **body)
    for number, event in enumerate(events):
        EVENTS.validate_python(event.data)
        assert (event.name, event.data["sequence_number"]) == (event.data["type"], number)
    return [event.data for event in events]


def test_an_answer(server):
    answer = respond(server, **GREEDY, metadata={"a": "b"}, user="me")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "demo")
    assert answer["id"].startswith("resp_")
    [message] = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert "Paris" in said(answer)
    assert message["content"][0]["logprobs"] == []
    assert (answer["metadata"], answer["user"], answer["store"]) == ({"a": "b"}, "me", True)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_it_is_chat(server):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": INPUT}]
    chat = server.answer("/v1/chat/completions", messages=messages, temperature=0, max_tokens=40)
    answer = respond(server, **GREEDY, instructions="Be brief.")
    assert said(answer) == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_an_answer_that_is_cut(server):
    answer = respond(server, **GREEDY | dict(max_output_tokens=3))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["completed_at"] is None
    assert answer["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(("limit", "end"), [(40, "response.completed"), (3, "response.incomplete")])
def test_the_events_of_a_stream(server, limit, end):
    body = GREEDY | dict(max_output_tokens=limit)
    events = stream(server, **body)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        end,
    ]
    whole = respond(server, **body)
    text = "".join(event["delta"] for event in events[4:-4])
    assert text == events[-4]["text"] == events[-3]["part"]["text"] == said(whole)
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    own = ("id", "created_at", "completed_at", "output")
    assert {k: v for k, v in last.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_clients_may_ask_for_the_usage_of_a_stream(server):
    """As of chat completions: `response.completed` has it anyway."""

    def kinds(events):
        """The types in order; how many deltas a text takes depends on how many tokens were read at once."""
        return [kind for kind, _ in itertools.groupby(event["type"] for event in events)]

    plain = stream(server, **GREEDY)
    for options in ({"include_usage": True}, {"include_usage": False, "include_obfuscation": False}):
        events = stream(server, **GREEDY, stream_options=options)
        assert kinds(events) == kinds(plain)
        assert events[-1]["response"]["usage"]["output_tokens"] > 0


def test_an_input_that_is_too_long(server):
    for text in ("word " * 600, "word " * 10**6):
        status, error = server.error(PATH, input=text)
        assert (status, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
        assert "This model's maximum context length is 512 tokens" in error["message"]


@pytest.mark.parametrize("count", [None, 2])
def test_logprobs(server, count):
    body = GREEDY | dict(include=[LOGPROBS], top_logprobs=count)
    whole = respond(server, **body)["output"][0]["content"][0]["logprobs"]
    assert len(whole) > 5
    assert all(len(entry["top_logprobs"]) == (count or 0) for entry in whole)
    events = stream(server, **body)
    deltas = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["token"] for entry in deltas] == [entry["token"] for entry in whole]
    assert events[-4]["logprobs"] == deltas


FORMS = [
    [{"role": "user", "content": INPUT}],
    [{"type": "message", "role": "user", "content": INPUT}],
    [{"role": "user", "content": [{"type": "input_text", "text": INPUT}]}],
    [
        {
            "type": "message",
            "role": "user",
            "status": "completed",
            "id": "x",
            "content": [{"type": "input_text", "text": INPUT}],
        }
    ],
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_message(server, form):
    assert prompt_of(server, input=form) == prompt_of(server)


def test_what_was_said_goes_back_in(server):
    answer = respond(server, **GREEDY, include=[LOGPROBS])
    text = said(answer)
    again = [{"role": "user", "content": "Thanks!"}]
    first = [{"role": "user", "content": INPUT}]
    as_it_came = prompt_of(server, input=first + answer["output"] + again)
    assert as_it_came == prompt_of(server, input=[*first, {"role": "assistant", "content": text}, *again])
    assert as_it_came > prompt_of(server, input=first + again)


def test_an_answer_that_was_cut_goes_on(server):
    start = respond(server, **GREEDY | dict(max_output_tokens=2))
    rest = respond(server, **GREEDY | dict(input=[{"role": "user", "content": INPUT}, *start["output"]]))
    assert said(start) + said(rest) == said(respond(server, **GREEDY))


def test_stop_and_other_fields_of_vllm(server):
    text = said(respond(server, **GREEDY))
    answer = respond(server, **GREEDY, stop=[text[8:12]], top_k=5, min_p=0.1, seed=3, cache_salt="s", priority=0)
    assert said(answer) == text[: text.index(text[8:12])]
    assert answer["status"] == "completed"


def test_cached_tokens(server):
    body = GREEDY | dict(instructions="You are very patient. " * 10, cache_salt="responses", max_output_tokens=1)
    first, second = (respond(server, **body)["usage"]["input_tokens_details"]["cached_tokens"] for _ in range(2))
    assert (first, second >= 16) == (0, True)


def test_a_request_that_takes_too_long(server):
    body = GREEDY | dict(max_output_tokens=400, ignore_eos=True)
    config = ServerConfig(request_timeout=0.05)
    assert server.ask(config, PATH, **body).status_code == 504
    events = server.cut_stream(PATH, **body)
    for event in events:
        EVENTS.validate_python(event.data)
    error, failed = events[-2:]
    assert (error.name, error.data["code"]) == ("error", "timeout_error")
    assert (failed.name, failed.data["response"]["status"]) == ("response.failed", "failed")
    assert failed.data["response"]["error"]["message"] == error.data["message"]
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))


# ---- refusals ----

BAD: list[tuple[dict[str, Any], str]] = [
    (dict(input=None), "input"),
    (dict(input=5), "input"),
    (dict(input=[]), "input"),
    (dict(input=[5]), "input[0]"),
    (dict(input=[{"role": "user"}]), "input[0].content"),
    (dict(input=[{"role": "robot", "content": "a"}]), "input[0].role"),
    (dict(input=[{"role": "user", "content": 5}]), "input[0].content"),
    (
        dict(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]),
        "input[0].content[0].type",
    ),
    (dict(input=[{"type": "function_call", "name": "f", "arguments": "{", "call_id": "x"}]), "input"),
    (dict(input=[{"type": "item_reference", "id": "x"}]), "input"),
    (
        dict(input=[{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]),
        "input[0].content[0].type",
    ),
    (dict(input="word " * 600), "input"),
    (dict(instructions=5), "instructions"),
    (dict(max_output_tokens=0), "max_output_tokens"),
    (dict(max_output_tokens=2**31), "max_output_tokens"),
    (dict(max_tokens=5), "max_tokens"),
    (dict(include=["everything"]), "include[0]"),
    (dict(include=LOGPROBS), "include"),
    (dict(top_logprobs=2), "top_logprobs"),
    (dict(include=[LOGPROBS], top_logprobs=26), "top_logprobs"),
    (dict(text={"format": {"type": "yaml"}}), "text.format.type"),
    (dict(text={"format": {"type": "json_schema", "name": "a"}}), "text.format.schema"),
    (dict(text={"verbosity": "lowest"}), "text.verbosity"),
    (dict(text="plain"), "text"),
    (dict(stream_options={"include_obfuscation": False}), "stream_options"),
    (dict(stream=True, stream_options={"include_obfuscation": "yes"}), "stream_options.include_obfuscation"),
    (dict(stream_options={"include_usage": True}), "stream_options"),
    (dict(temperature=-1), "temperature"),
    (dict(top_p=2), "top_p"),
    (dict(n=2), "n"),
    (dict(chat_template_kwargs={"self": 5}), "chat_template_kwargs"),
    (dict(store="yes"), "store"),
    (dict(background=True), "background"),
    (dict(previous_response_id="resp_1"), "previous_response_id"),
    (dict(conversation="conv_1"), "conversation"),
    (dict(prompt={"id": "x"}), "prompt"),
    (dict(reasoning={"effort": "some"}), "reasoning.effort"),
    (dict(truncation="middle"), "truncation"),
    (dict(tools=[{"type": "hammer"}]), "tools[0].type"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(return_token_ids=True), "return_token_ids"),
    (dict(service_tier="gold"), "service_tier"),
    (dict(messages=[]), "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_field_is_named(server, body, param):
    status, error = server.error(PATH, **dict(input="Hello", max_output_tokens=4) | body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]


def test_a_model_that_is_not_here(server):
    status, error = server.error(PATH, **GREEDY, model="gpt-9")
    assert (status, error["code"]) == (404, "model_not_found")


# ---- OpenAI's client ----


def test_the_client_of_openai(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = dict(model="demo", input=INPUT, temperature=0, max_output_tokens=40)
        response = client.responses.create(**body)
        assert (response.status, response.output_text) == ("completed", said(respond(server, **GREEDY)))
        follow_up = [{"role": "user", "content": INPUT}, *response.output, {"role": "user", "content": "Thanks!"}]
        assert client.responses.create(**body | {"input": follow_up}).output_text
        kinds = [event.type for event in client.responses.create(**body, stream=True)]
        assert kinds[-1] == "response.completed"
        with client.responses.stream(**body) as events:
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            final = events.get_final_response()
        assert text == final.output_text == response.output_text
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**body, background=True)
        assert caught.value.param == "background"


def test_the_client_that_awaits(server):
    import openai

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            async with client.responses.stream(model="demo", input=INPUT, temperature=0) as events:
                return (await events.get_final_response()).output_text

    assert "Paris" in asyncio.run(run())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_that_is_asked_for_has_no_other_form(server: Server, choice: Any) -> None:
    """`text.format` is the form of a text. OpenAI and vLLM take both fields, and instructor sends them."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": schema}
    format = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}
    asked = GREEDY | dict(tools=[tool], tool_choice=choice, parallel_tool_calls=False, text={"format": format})
    [call] = respond(server, **asked)["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert call["arguments"] in ('{"city": "Oslo"}', '{"city": "Rome"}')
