"""A tiny server that speaks OpenAI's protocol as real ones do, and misbehaves when the prompt says so."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.asgi import in_thread

NUM_TOKENS = 5  # of an answer, unless max_tokens says less; all of them with ignore_eos
CACHED = 3


class FakeServer:
    """An ASGI application. `bodies` are the requests it got; `disconnects` counts streams whose reader went away.

    A prompt of `refuse` gets a 400, `busy` a 503 and then an answer, `fail` an error event after two tokens, `cut` a
    stream that just ends, `slow` an event every twentieth of a second.
    """

    def __init__(self) -> None:
        self.base_url = ""
        self.forget()

    def forget(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.disconnects = 0
        self.most_at_once = 0
        self.api_key: str | None = None
        self.max_model_len: int | None = None  # None: it does not tell
        self.odd_paths: set[str] = set()  # these answer 200, and no object
        self.metrics: list[str] = []  # what it answers Prometheus, one after the other; then 404
        self._running = 0
        self._was_busy = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.headers.append(headers)
        if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            await _json(send, 401, _error("wrong API key"))
        elif scope["path"] == "/v1/models" and "/v1/models" in self.odd_paths:
            await _json(send, 200, ["no object"])
        elif scope["path"] == "/v1/models":
            model = {"id": "fake", "object": "model"} | self._length()
            await _json(send, 200, {"object": "list", "data": [model]})
        elif scope["path"] == "/metrics":
            await _text(send, self.metrics.pop(0)) if self.metrics else await _json(send, 404, _error("not found"))
        else:
            body = json.loads(await _body(receive))
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            try:
                await self._answer(scope["path"], body, receive, send)
            finally:
                self._running -= 1

    def _length(self) -> dict[str, int]:
        return {} if self.max_model_len is None else {"max_model_len": self.max_model_len}

    async def _answer(self, path: str, body: dict[str, Any], receive: Any, send: Any) -> None:
        if path in self.odd_paths:
            return await _json(send, 200, ["no object"])
        if path == "/tokenize":
            tokens = [ord(letter) for letter in body["prompt"]]
            return await _json(send, 200, {"tokens": tokens, "count": len(tokens)} | self._length())
        if path == "/detokenize":
            return await _json(send, 200, {"prompt": "".join(map(chr, body["tokens"]))})
        self.bodies.append(body)
        self.paths.append(path)
        if path in ("/v1/responses", "/v1/messages"):
            # Anthropic's input tokens are without those of the cache, OpenAI's are with them.
            cached = {"cache_read_input_tokens": 1, "cache_creation_input_tokens": 0}
            of_messages = {"input_tokens": 1, "output_tokens": 3, **cached}
            usage = of_messages if path == "/v1/messages" else {"input_tokens": 2, "output_tokens": 3}
            return await _json(send, 200, {"id": "r-1", "usage": usage})
        is_chat = path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if prompt == "refuse":
            return await _json(send, 400, _error("temperature must be at most 2, not 3"))
        if prompt == "busy" and not self._was_busy:
            self._was_busy = True
            return await _json(send, 503, _error("the queue is full"), [(b"retry-after", b"0")])
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 100
        count = most if body.get("ignore_eos") else min(most, NUM_TOKENS)
        finish = "length" if count == most else "stop"
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
            "prompt_tokens_details": {"cached_tokens": CACHED},
        }
        if not body.get("stream"):
            text = "".join(f" t{i}" for i in range(count))
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            whole = {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": finish, **choice}], "usage": usage}
            return await _json(send, 200, whole)
        gone = asyncio.create_task(_gone(receive))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for event in self._events(is_chat, prompt, count, finish, usage, body.get("stream_options") or {}):
            if prompt == "slow":
                await asyncio.wait([gone], timeout=0.05)
            if gone.done():
                self.disconnects += 1
                return
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        gone.cancel()

    def _events(
        self, is_chat: bool, prompt: Any, count: int, finish: str, usage: dict[str, Any], options: dict[str, Any]
    ) -> Iterator[bytes]:
        def chunk(finish_reason: str | None, text: str = "", **delta: str) -> bytes:
            new = {"delta": ({"content": text} if text else {}) | delta} if is_chat else {"text": text}
            return _event({"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": finish_reason, **new}]})

        if is_chat:
            yield chunk(None, role="assistant", content="")
        for index in range(count):
            yield chunk(None, f" t{index}")
            if index == 0:
                yield b": keep-alive\n\n"
            if index == 1 and prompt == "cut":
                return
            if index == 1 and prompt == "fail":
                yield b"event: error\n" + _event(_error("the engine died"))
                return
        yield chunk(finish)
        if options.get("include_usage"):
            yield _event({"id": "cmpl-1", "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


@contextmanager
def serving(app: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port of its own, in a thread."""
    options = {"log_level": "critical", "lifespan": "off", "ws": "none", "loop": "asyncio", "http": "h11"}
    with in_thread(app, **options) as app.base_url:
        yield app


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


async def _json(send: Any, status: int, value: Any, headers: Any = ()) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json"), *headers]}
    )
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def _text(send: Any, text: str) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": text.encode()})


async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
