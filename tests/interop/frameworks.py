"""Asks a server through frameworks that cannot share an environment with the tests, and prints what they made of it.

    .clients/bin/python tests/interop/frameworks.py URL KEY

Each function below is one check. The output is a JSON object with the result of each, or its error.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

os.environ |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

import agents
import instructor
import litellm
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY = sys.argv[1], sys.argv[2]
ROOT = URL.removesuffix("/v1")
QUESTION = "What is the weather in Oslo?"
RESULT = '{"sky":"rainy","degrees":3}'
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 100}


class Weather(BaseModel):
    """What the weather is. All of its values are short, so that a small model comes to an end."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Paris"]
    sky: Literal["rainy", "sunny"]
    cold: bool


def get_weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: The name of the city.
    """
    assert city == "Oslo", city
    return RESULT


def shown(found: Any) -> Any:
    assert isinstance(found, Weather), found
    return sorted(found.model_dump())


# ---- openai-agents ----


def agent(model: str, **options: Any) -> Any:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    settings = agents.ModelSettings(**SETTINGS)
    return agents.Agent(
        name="a", model=kinds[model](model="demo", openai_client=client), model_settings=settings, **options
    )


async def agents_chat_tool() -> Any:
    answer = await agents.Runner.run(agent("chat", tools=[agents.function_tool(get_weather)]), QUESTION)
    return [type(item).__name__ for item in answer.new_items], "rainy" in answer.final_output


async def agents_responses_tool() -> Any:
    answer = await agents.Runner.run(agent("responses", tools=[agents.function_tool(get_weather)]), QUESTION)
    return [type(item).__name__ for item in answer.new_items], "rainy" in answer.final_output


async def agents_responses_streamed() -> Any:
    run = agents.Runner.run_streamed(agent("responses", tools=[agents.function_tool(get_weather)]), QUESTION)
    kinds = {event.type async for event in run.stream_events()}
    return sorted(kinds), "rainy" in run.final_output


async def agents_chat_output() -> Any:
    return shown((await agents.Runner.run(agent("chat", output_type=Weather), QUESTION)).final_output)


async def agents_responses_output() -> Any:
    return shown((await agents.Runner.run(agent("responses", output_type=Weather), QUESTION)).final_output)


# ---- pydantic-ai ----


def pydantic_agent(model: str, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    messages = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=ROOT, api_key=KEY))
    models = {
        "chat": lambda: OpenAIChatModel("demo", provider=provider),
        "responses": lambda: OpenAIResponsesModel("demo", provider=provider),
        "messages": lambda: AnthropicModel("demo", provider=messages),
    }
    return Agent(models[model](), model_settings=SETTINGS, **options)  # type: ignore[arg-type]


async def pydantic_ai_chat_tool() -> Any:
    return "rainy" in (await pydantic_agent("chat", tools=[get_weather]).run(QUESTION)).output


async def pydantic_ai_responses_tool() -> Any:
    return "rainy" in (await pydantic_agent("responses", tools=[get_weather]).run(QUESTION)).output


async def pydantic_ai_messages_tool() -> Any:
    return "rainy" in (await pydantic_agent("messages", tools=[get_weather]).run(QUESTION)).output


async def pydantic_ai_chat_streamed() -> Any:
    async with pydantic_agent("chat", tools=[get_weather]).run_stream(QUESTION) as answer:
        return "rainy" in await answer.get_output()


async def pydantic_ai_chat_native() -> Any:
    return shown((await pydantic_agent("chat", output_type=NativeOutput(Weather)).run(QUESTION)).output)


async def pydantic_ai_responses_native() -> Any:
    return shown((await pydantic_agent("responses", output_type=NativeOutput(Weather)).run(QUESTION)).output)


async def pydantic_ai_chat_tool_output() -> Any:
    return shown((await pydantic_agent("chat", output_type=ToolOutput(Weather)).run(QUESTION)).output)


async def pydantic_ai_responses_tool_output() -> Any:
    return shown((await pydantic_agent("responses", output_type=ToolOutput(Weather)).run(QUESTION)).output)


async def pydantic_ai_messages_tool_output() -> Any:
    return shown((await pydantic_agent("messages", output_type=ToolOutput(Weather)).run(QUESTION)).output)


# ---- instructor ----


def from_openai(mode: instructor.Mode) -> Any:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": QUESTION}]
    return shown(
        client.chat.completions.create(
            model="demo", messages=messages, response_model=Weather, max_retries=0, **SETTINGS
        )
    )


def instructor_tools() -> Any:
    return from_openai(instructor.Mode.TOOLS)


def instructor_tools_strict() -> Any:
    return from_openai(instructor.Mode.TOOLS_STRICT)


def instructor_json_schema() -> Any:
    return from_openai(instructor.Mode.JSON_SCHEMA)


def instructor_responses_tools() -> Any:
    client = instructor.from_openai(
        OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=instructor.Mode.RESPONSES_TOOLS
    )
    return shown(
        client.responses.create(
            model="demo",
            input=QUESTION,
            response_model=Weather,
            max_retries=0,
            temperature=0,
            max_output_tokens=100,
        )
    )


def instructor_anthropic_tools() -> Any:
    client = instructor.from_anthropic(
        Anthropic(base_url=ROOT, api_key=KEY, max_retries=0), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    messages: Any = [{"role": "user", "content": QUESTION}]
    return shown(
        client.messages.create(model="demo", messages=messages, response_model=Weather, max_tokens=100, max_retries=0)
    )


# ---- litellm ----

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def lite(model: str, **options: Any) -> Any:
    base = ROOT if model.startswith("anthropic/") else URL
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"messages": messages, "num_retries": 0, **SETTINGS, **options}
    return litellm.completion(model=model, api_base=base, api_key=KEY, **asked)


def called(message: Any) -> Any:
    [call] = message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


def litellm_tool() -> Any:
    return called(lite("openai/demo", tools=[TOOL]).choices[0].message)


def litellm_hosted_vllm_tool() -> Any:
    return called(lite("hosted_vllm/demo", tools=[TOOL]).choices[0].message)


def litellm_streamed_tool() -> Any:
    chunks = list(lite("openai/demo", tools=[TOOL], stream=True))
    return called(litellm.stream_chunk_builder(chunks).choices[0].message)


def litellm_anthropic_tool() -> Any:
    return called(lite("anthropic/demo", tools=[TOOL]).choices[0].message)


def litellm_output() -> Any:
    text = lite("openai/demo", response_format=Weather).choices[0].message.content
    return shown(Weather.model_validate_json(text))


def litellm_too_long() -> Any:
    try:
        lite("openai/demo", messages=[{"role": "user", "content": "word " * 700}])
    except litellm.ContextWindowExceededError:
        return "ContextWindowExceededError"
    return None


def checks() -> Iterable[Callable[[], Any]]:
    """The functions of this file that take nothing, in their order."""
    for name, value in list(globals().items()):
        is_own = inspect.isfunction(value) and value.__module__ == __name__
        if is_own and not inspect.signature(value).parameters and name not in ("checks", "main"):
            yield value


def main() -> None:
    agents.set_tracing_disabled(True)
    found: dict[str, Any] = {}
    for check in checks():
        try:
            result = check()
            found[check.__name__] = asyncio.run(result) if inspect.iscoroutine(result) else result
        except Exception as error:
            traceback.print_exc()
            found[check.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
