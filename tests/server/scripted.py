"""A server whose model says what a test wrote: everything but the engine is real."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxvllm.server.config import ServerConfig
from tests.server.conftest import Server, application, events_of
from tests.waiting import PATIENCE

# What a model of Hermes' family writes that calls two functions.
TWO_CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


class _Outputs:
    """The outputs of one request, in the form of a `RequestStream`."""

    def __init__(self, outputs: Sequence[RequestOutput]):
        self._outputs = iter(outputs)
        self.warnings: list[str] = []

    async def accepted(self) -> None: ...

    async def aclose(self) -> None: ...

    def abort(self, error: Exception) -> None: ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        for output in self._outputs:
            return output
        raise StopAsyncIteration


class ScriptedLLM:
    """An `AsyncLLM` that passes everything on to a real one, except requests: these it answers with a script."""

    def __init__(self, real: Any):
        self._real = real
        self.requests: list[GenerationRequest] = []

    def play(self, script: "Script") -> None:
        """Answers the next requests with this script, and forgets the last."""
        self._script = script
        self.config = replace(self._real.config, reasoning_parser=script.reasoning_parser)
        self.requests.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def observe(self, observer: object) -> None: ...

    def enqueue(self, request: GenerationRequest) -> _Outputs:
        self.requests.append(request)
        streams = request.params.output_kind is RequestOutputKind.DELTA
        parts = self._script.parts if streams else ["".join(self._script.parts)]
        last = len(parts) - 1
        return _Outputs([self._output(request, part, i, i == last) for i, part in enumerate(parts)])

    def _output(self, request: GenerationRequest, text: str, number: int, is_last: bool) -> RequestOutput:
        ids = self._real.reader.tokenizer.encode(text, add_special_tokens=False)
        spell = self._real.reader.tokenizer.token_text
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=ids,
            logprobs=None if request.params.logprobs is None else [{i: Logprob(-1.0, 1, spell(i))} for i in ids],
            finish_reason=self._script.finish_reason if is_last else None,  # type: ignore[arg-type]
            # Every second part was guessed.
            draft_spans=[(text, number % 2 == 1)] if request.wants_draft_spans else None,
        )
        prompt = request.prompt
        return RequestOutput(request.request_id, prompt.text, prompt.token_list, [completion], finished=is_last)


type Says = Callable[..., Script]  # of the fixture `says`
# Servers by their options, because making one takes half a second.
type Apps = dict[tuple[Any, ...], tuple[ScriptedLLM, Any]]


@dataclass(frozen=True)
class Script:
    """What the model says, in the parts of a stream, and how its server was started."""

    server: Server
    apps: "Apps"
    parts: Sequence[str]
    finish_reason: str = "stop"
    reasoning_parser: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the `ServerConfig`

    def post(self, path: str, **body: Any) -> tuple[httpx.Response, list[GenerationRequest]]:
        """The answer, with the requests that the engine got."""

        async def run() -> tuple[httpx.Response, list[GenerationRequest]]:
            llm, transport = self._play()
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.post(path, json=body), list(llm.requests)

        return self.server.portal.call(asyncio.wait_for, run(), PATIENCE)

    def choice(self, path: str, **body: Any) -> Any:
        """The one choice of an answer."""
        response, _ = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def chunks(self, path: str, **body: Any) -> list[Any]:
        """The chunks of a stream that ended well."""
        response, _ = self.post(path, **body, stream=True)
        assert response.status_code == 200, response.text
        events = list(events_of(response.text))
        assert events.pop().data == "[DONE]"
        return [event.data for event in events]

    def openai_stream(self, **body: Any) -> Any:
        """The completion that OpenAI's streaming helper makes of the events."""
        import openai

        async def run() -> Any:
            _, transport = self._play()
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://server") as http,
                openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http) as client,
                client.chat.completions.stream(model="demo", **body) as stream,
            ):
                return json.loads((await stream.get_final_completion()).to_json())

        return self.server.portal.call(asyncio.wait_for, run(), PATIENCE)

    def _play(self) -> tuple[ScriptedLLM, httpx.ASGITransport]:
        """Returns the model that says this, and the way to its server."""
        key = tuple(sorted(self.options.items()))
        if key not in self.apps:
            llm = ScriptedLLM(self.server.llm)
            llm.play(self)
            self.apps[key] = llm, application(llm, ServerConfig(**self.options))  # type: ignore[arg-type]
        llm, app = self.apps[key]
        llm.play(self)
        return llm, httpx.ASGITransport(app, raise_app_exceptions=False)
