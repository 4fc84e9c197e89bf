"""What litellm gets from a server: `tests.interop.litellm_client URL KEY` prints one JSON object, a key a check.

It runs in the environment `.clients`. Its import takes 5 to 30 s, so one process makes all of its calls.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import litellm
from pydantic import BaseModel, Field

from tests.interop.checks import report

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=0, le=40)


class Client:
    """litellm with the address and the key of one server, and with greedy, short answers."""

    def __init__(self, url: str, key: str):
        self._key = {"api_key": key}
        self._url = {"api_base": url}
        self._base = {"api_base": url.removesuffix("/v1")}  # of a server that speaks as Anthropic's
        self._common = {"num_retries": 0, "max_retries": 0, "temperature": 0}

    def checks(self) -> dict[str, Callable[[], Any]]:
        return {
            "text": lambda: self._chat(CAPITAL).choices[0].message.content,
            "hosted_vllm": lambda: self._chat(CAPITAL, "hosted_vllm").choices[0].message.content,
            "anthropic": lambda: self._chat(CAPITAL, "anthropic").choices[0].message.content,
            "stream": lambda: self._streamed(CAPITAL),
            "hosted_vllm_stream": lambda: self._streamed(CAPITAL, "hosted_vllm"),
            "anthropic_stream": lambda: self._streamed(CAPITAL, "anthropic"),
            "async": self._asynchronous,
            "responses": self._responses,
            "completion": self._completion,
            "usage": lambda: self._chat(CAPITAL).usage.model_dump(),
            "tool": lambda: _call(self._chat(WEATHER, tools=[TOOL])),
            "tool_required": lambda: _call(
                self._chat(WEATHER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
            ),
            "hosted_vllm_tool": lambda: _call(self._chat(WEATHER, "hosted_vllm", tools=[TOOL])),
            "anthropic_tool": lambda: _call(self._chat(WEATHER, "anthropic", tools=[TOOL])),
            "tool_stream": lambda: _call(self._rebuilt(WEATHER, tools=[TOOL])),
            "tool_answer": self._answer_with_a_tool,
            "report": lambda: self._report("openai"),
            "hosted_vllm_report": lambda: self._report("hosted_vllm"),
            "choice": lambda: self._chosen("hosted_vllm"),
            "bad_request": lambda: _error(lambda: self._chat(CAPITAL, top_p=7)),
            "no_model": lambda: _error(lambda: self._chat(CAPITAL, model="gpt-17")),
            "no_key": lambda: _error(lambda: self._chat(CAPITAL, api_key="wrong")),
            "too_long": lambda: _error(lambda: self._chat([{"role": "user", "content": "word " * 700}])),
        }

    def _asked(self, messages: Any, provider: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
        where = self._base if provider == "anthropic" else self._url
        asked = {"model": f"{provider}/{model}", "messages": messages, "max_tokens": 60}
        return self._key | where | self._common | asked | options

    def _chat(self, messages: Any, provider: str = "openai", model: str = "demo", **options: Any) -> Any:
        return litellm.completion(**self._asked(messages, provider, model, options))

    def _streamed(self, messages: Any, provider: str = "openai") -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in self._chat(messages, provider, stream=True))

    def _rebuilt(self, messages: Any, **options: Any) -> Any:
        """An answer that litellm puts together from its stream."""
        return litellm.stream_chunk_builder(list(self._chat(messages, stream=True, **options)))

    def _asynchronous(self) -> str:
        async def run() -> str:
            answer: Any = await litellm.acompletion(**self._asked(CAPITAL, "openai", "demo", {}))
            return str(answer.choices[0].message.content)

        return asyncio.run(run())

    def _responses(self) -> str:
        answer: Any = litellm.responses(
            model="openai/demo",
            input=CAPITAL[0]["content"],
            max_output_tokens=60,
            temperature=0,
            **self._key,
            **self._url,
        )
        return str(answer.output[0].content[0].text)

    def _completion(self) -> str:
        answer: Any = litellm.text_completion(
            model="text-completion-openai/demo",
            prompt="The capital of France is",
            max_tokens=4,
            temperature=0,
            **self._key,
            **self._url,
        )
        return str(answer.choices[0].text)

    def _answer_with_a_tool(self) -> str:
        message = self._chat(WEATHER, tools=[TOOL]).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"sky":"rainy","degrees":3}'}
        return str(self._chat([*WEATHER, message, result], tools=[TOOL]).choices[0].message.content)

    def _report(self, provider: str) -> dict[str, Any]:
        answer = self._chat(WEATHER, provider, response_format=Report)
        return Report.model_validate_json(answer.choices[0].message.content).model_dump()

    def _chosen(self, provider: str) -> str:
        form = {"structured_outputs": {"choice": ["left", "right"]}}
        return str(self._chat(CAPITAL, provider, extra_body=form).choices[0].message.content)


def _call(answer: Any) -> Any:
    [call] = answer.choices[0].message.tool_calls
    return [call.function.name, json.loads(call.function.arguments), answer.choices[0].finish_reason]


def _error(ask: Callable[[], Any]) -> Any:
    try:
        ask()
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None)]
    return None


def main() -> None:
    litellm.suppress_debug_info = True
    report(Client(*sys.argv[1:]).checks())


if __name__ == "__main__":
    main()
