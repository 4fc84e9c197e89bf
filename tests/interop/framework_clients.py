"""What frameworks get from a server: `framework_clients.py URL KEY` prints one JSON object, a key a check.

They run in the environment `.clients`, because their versions of what they share are not those of the package's own.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import agents
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Oslo?"


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=0, le=40)


class Anything(BaseModel):
    """Any object is one: instructor's mode JSON asks for an object, and has its schema in the prompt only."""


def agent_answers(url: str, key: str, streamed: bool) -> dict[str, Any]:
    """What an agent says that must call its tool first, and with what it called the tool."""
    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """Returns the weather of a city."""
        asked.append(city)
        return '{"sky":"rainy","degrees":3}'

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            agent = agents.Agent(
                name="forecaster",
                tools=[get_weather],
                model=agents.OpenAIChatCompletionsModel("demo", client),
                model_settings=agents.ModelSettings(
                    temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False
                ),
            )
            if not streamed:
                return str((await agents.Runner.run(agent, QUESTION)).final_output)
            running = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in running.stream_events():
                pass
            return str(running.final_output)

    return {"said": asyncio.run(run()), "asked": asked}


def agent_report(url: str, key: str) -> dict[str, Any]:
    """The report of an agent whose answer has a type."""

    async def run() -> Report:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            agent = agents.Agent(
                name="reporter",
                output_type=Report,
                model=agents.OpenAIChatCompletionsModel("demo", client),
                model_settings=agents.ModelSettings(temperature=0, max_tokens=60),
            )
            return (await agents.Runner.run(agent, QUESTION)).final_output_as(Report, raise_if_incorrect_type=True)

    return asyncio.run(run()).model_dump()


def instructed(url: str, key: str, mode: Mode, kind: type[BaseModel] = Report) -> dict[str, Any]:
    """What instructor makes of the answer in this mode, at the first attempt."""
    limit = "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        made = instructor.from_openai(client, mode=mode).create(
            model="demo",
            messages=[{"role": "user", "content": QUESTION}],
            response_model=kind,
            temperature=0,
            max_retries=0,
            **{limit: 60},
        )
    assert isinstance(made, kind)
    return made.model_dump()


def main() -> None:
    url, key = sys.argv[1:]
    agents.set_tracing_disabled(True)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "agent": partial(agent_answers, url, key, streamed=False),
        "agent_stream": partial(agent_answers, url, key, streamed=True),
        "agent_report": partial(agent_report, url, key),
    }
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        checks[f"instructor_{mode.name}"] = partial(instructed, url, key, mode)
    checks["instructor_JSON"] = partial(instructed, url, key, Mode.JSON, Anything)
    results = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = {"failed": repr(error)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
