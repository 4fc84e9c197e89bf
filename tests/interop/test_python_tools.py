"""Tools, and forms of the answer, in `openai`, `anthropic`, `langchain-openai` and `pydantic-ai`, unmodified."""

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.faults.server import KEY

# Clients are imported by the tests that need them: all processes of a run collect this file, and one of them runs it.
if TYPE_CHECKING:
    import openai
    from langchain_openai import ChatOpenAI

QUESTION = "What is the weather in Oslo?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
OSLO = {"city": "Oslo"}
CITIES = ("Oslo", "Rome")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True},
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": PARAMETERS, "strict": True},
}


class Report(BaseModel):
    """A report of the weather."""

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=0, le=40)


@pytest.fixture(scope="module")
def client(url: str) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


# ---- openai ----


def test_a_required_tool_and_its_result(client: "openai.OpenAI") -> None:
    body = ASKED | {"tools": [WEATHER, TIME]}
    [choice] = client.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False).choices
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", OSLO)
    assert choice.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky":"rainy","degrees":3}'}
    answer = client.chat.completions.create(**body | {"messages": [*MESSAGES, choice.message, result]})
    assert "rainy" in answer.choices[0].message.content


def test_a_named_tool_is_streamed_with_the_helper(client: "openai.OpenAI") -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    with client.chat.completions.stream(**ASKED, tools=[WEATHER, TIME], tool_choice=named) as stream:  # type: ignore[arg-type]
        events = list(stream)
        [choice] = stream.get_final_completion().choices
    deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    [call] = choice.message.tool_calls
    assert (call.function.name, done.name) == ("get_time", "get_time")
    assert call.function.parsed_arguments == done.parsed_arguments == json.loads("".join(deltas))
    assert call.function.parsed_arguments["city"] in CITIES
    assert len(deltas) > 1


def test_an_answer_is_parsed_as_a_class(client: "openai.OpenAI") -> None:
    message = client.chat.completions.parse(**ASKED, response_format=Report).choices[0].message
    assert isinstance(message.parsed, Report)
    with client.chat.completions.stream(**ASKED, response_format=Report) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed


def test_bias_and_penalties_change_the_answer(client: "openai.OpenAI") -> None:
    body = ASKED | {"max_tokens": 12, "logit_bias": {"50": 100, "51": 90}, "extra_body": {"return_token_ids": True}}
    biased, penalised = (
        set(client.chat.completions.create(**body, **penalties).choices[0].model_dump()["token_ids"])
        for penalties in ({}, {"frequency_penalty": 2, "presence_penalty": 2})
    )
    assert (biased, penalised) == ({50}, {50, 51})


def test_responses_with_a_form_and_a_tool(client: "openai.OpenAI") -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    assert isinstance(client.responses.parse(**asked, text_format=Report).output_parsed, Report)
    tool: Any = {"type": "function"} | WEATHER["function"]
    with client.responses.stream(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert (call.name, json.loads(call.arguments)) == ("get_weather", OSLO)
    inputs = [*MESSAGES, call, {"type": "function_call_output", "call_id": call.call_id, "output": "rainy"}]
    assert client.responses.create(**asked | {"input": inputs}, tools=[tool]).output_text


# ---- anthropic ----


def test_anthropics_tools(url: str) -> None:
    import anthropic

    tool = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 60, "tools": [tool], "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        answer = client.messages.create(**asked, messages=MESSAGES, tool_choice=choice)
        [call] = answer.content
        assert (call.type, call.name, call.input, answer.stop_reason) == ("tool_use", "get_weather", OSLO, "tool_use")
        with client.messages.stream(**asked, messages=MESSAGES, tool_choice=choice) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            assert stream.get_final_message().content[0].input == json.loads("".join(parts)) == OSLO
        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky":"rainy","degrees":3}'}
        turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert "rainy" in client.messages.create(**asked, messages=turns).content[0].text


# ---- langchain ----


@pytest.fixture(scope="module")
def chat(url: str) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key=KEY, model="demo", temperature=0, max_tokens=60, max_retries=0)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_answers_with_a_class(chat: "ChatOpenAI", method: Any) -> None:
    assert isinstance(chat.with_structured_output(Report, method=method).invoke(QUESTION), Report)


def test_langchains_tools(chat: "ChatOpenAI") -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chat.bind_tools([WEATHER], tool_choice="any", parallel_tool_calls=False)
    message = bound.invoke(QUESTION)
    [call] = message.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", OSLO)
    chunks = list(bound.stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("get_weather", OSLO)]
    turns = [HumanMessage(QUESTION), message, ToolMessage('{"sky":"rainy","degrees":3}', tool_call_id=call["id"])]
    assert "rainy" in chat.bind_tools([WEATHER]).invoke(turns).content


# ---- pydantic-ai ----


def test_pydantic_ai(url: str) -> None:
    import openai
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    asked = []

    def get_weather(city: Literal["Oslo", "Rome"]) -> dict[str, Any]:
        """The weather."""
        asked.append(city)
        return {"sky": "rainy", "degrees": 3}

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
            settings = ModelSettings(temperature=0, max_tokens=60)
            agents: list[Any] = [
                Agent(model, output_type=form, model_settings=settings, retries=0)
                for form in (ToolOutput(Report), NativeOutput(Report))
            ]
            agents.append(Agent(model, tools=[get_weather], model_settings=settings, retries=0))
            return [(await agent.run(QUESTION)).output for agent in agents]

    *reports, said = asyncio.run(run())
    assert all(isinstance(report, Report) for report in reports)
    assert asked == ["Oslo"] and "rainy" in said
