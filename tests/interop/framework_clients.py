"""What frameworks get from a server: `tests.interop.framework_clients URL KEY` prints one JSON object, a key a check.

They run in the environment `.clients`, because their versions of what they share are not those of the package's own.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import agents
import instructor
import openai
from instructor import Mode
from instructor.v2.core.provider_specs import PROVIDER_SPECS, Provider
from pydantic import BaseModel, Field

from tests.interop.checks import report

QUESTION = "What is the weather in Oslo?"


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=0, le=40)


class get_weather(BaseModel):
    """Returns the weather of a city."""

    city: str


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


# In this mode the form is in the prompt only, and a small model does not keep to it without help.
FENCED_REPORT = r'```json\n\{"city": "(Oslo|Rome)", "degrees": [1-3]?[0-9]\}\n```'
HELP = {Mode.MD_JSON: {"structured_outputs": {"regex": FENCED_REPORT}}}


def instructor_modes() -> list[str]:
    """The modes that instructor has for OpenAI's client, by their names."""
    spec = PROVIDER_SPECS[Provider.OPENAI]
    return sorted(mode.name for mode in (*spec.supported_modes, *spec.legacy_modes))


def instructed(
    url: str, key: str, mode: Mode, kind: type[BaseModel] = Report, is_streamed: bool = False, **more: Any
) -> dict[str, Any]:
    """What instructor makes of the answer in this mode, at the first attempt."""
    is_response = mode in (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        made = instructor.from_openai(client, mode=mode)
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "response_model": kind,
            "temperature": 0,
            "max_retries": 0,
            "extra_body": HELP.get(mode),
            "max_output_tokens" if is_response else "max_tokens": 60,
            **more,
        }
        if is_streamed:
            parts = list(made.create_partial(**asked))
            assert len(parts) > 2
            found = parts[-1]
        else:
            found = made.create(**asked)
    assert isinstance(found, kind)
    return found.model_dump()


def instructed_calls(url: str, key: str) -> list[Any]:
    """The calls of tools that instructor makes objects of, where the model chooses what to call and how often."""
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        calls = instructor.from_openai(client, mode=Mode.PARALLEL_TOOLS).create(
            model="demo",
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Iterable[get_weather],
            temperature=0,
            max_retries=0,
            max_tokens=60,
        )
        return [[type(call).__name__, call.model_dump()] for call in calls]


def main() -> None:
    url, key = sys.argv[1:]
    agents.set_tracing_disabled(True)
    checks: dict[str, Callable[[], Any]] = {
        "instructor_modes": instructor_modes,
        "agent": partial(agent_answers, url, key, streamed=False),
        "agent_stream": partial(agent_answers, url, key, streamed=True),
        "agent_report": partial(agent_report, url, key),
    }
    # The second four are old names; instructor sends for them what it sends for some of the first.
    for mode in (
        *(Mode.TOOLS, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS),
        *(Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_O1, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS),
    ):
        checks[f"instructor_{mode.name}"] = partial(instructed, url, key, mode)
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS):
        checks[f"instructor_{mode.name}_stream"] = partial(instructed, url, key, mode, is_streamed=True)
    checks["instructor_strict"] = partial(instructed, url, key, Mode.TOOLS, strict=True)
    checks["instructor_JSON"] = partial(instructed, url, key, Mode.JSON, Anything)
    checks["instructor_PARALLEL_TOOLS"] = partial(instructed_calls, url, key)
    report(checks)


if __name__ == "__main__":
    main()
