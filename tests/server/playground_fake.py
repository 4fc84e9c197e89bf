"""A server with the endpoints that the playground uses, and no engine: OpenAI's shapes, answers by rote."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

import jaxvllm.server
from tests.asgi import in_thread
from tests.explainer.reports import hostile_report, long_explanation

FILES = Path(jaxvllm.server.__file__).parent / "playground"
# Half a character each, a leading space that the answer lacks, and an end that has no text.
TOKENS = (b" Once", b" upon", b" a", b" caf", b"\xc3", b"\xa9", b"\n", b"<b>", b"bold", b"<|end|>")
DRAFTS = (" upon", " a", "bold")  # those of them that were accepted drafts
TEXT = "Once upon a café\n<b>bold"
KEY = "sesame"
# A model that thinks first, and then calls a tool.
CALL_DELTAS: tuple[dict[str, Any], ...] = (
    {"reasoning": "They ask for "},
    {"reasoning": "the weather."},
    {"tool_calls": [{"index": 0, "id": "call-12345", "type": "function", "function": {"name": "get_weather"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
)
CONTEXT = 512
STATE = {
    "page_size": 16,
    "replicas": [
        {
            "states": [3, 1, 1, 1, 1, 2, 2] + [0] * 25,
            "requests": [
                {"id": "chatcmpl-one", "pages": [1, 2, 3], "shared": [1], "tokens": 40},
                {"id": "chatcmpl-two", "pages": [1, 4], "shared": [1], "tokens": 20},
            ],
        }
    ],
    "stats": {"running": 2, "waiting": 1, "pages": 31, "pages_owned": 4},
    "steps": [
        {"t": 0.0, "replica": 0, "decode": 2, "prefill": 30, "bucket": 64, "host_ms": 0.5, "device_ms": 12.0},
        {"t": 0.1, "replica": 0, "decode": 2, "prefill": 0, "bucket": 2, "host_ms": 0.4, "device_ms": 3.0},
    ],
}


class Fake:
    """What was asked of it, and how it behaves."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_aborted = 0
        self.wants_key = False
        self.context_messages = 100  # more are too many for the model's context
        self.prompt_tokens = 9  # of each prompt, whatever it says
        self.has_drafts = True  # whether something guesses tokens

    def app(self) -> FastAPI:
        app = FastAPI(dependencies=[Depends(self.let_in)])
        app.add_exception_handler(PermissionError, lambda request, _: error(401, "give an API key"))

        @app.get("/")
        def page() -> FileResponse:
            return FileResponse(FILES / "index.html", headers={"Content-Security-Policy": "default-src 'self'"})

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "demo", "object": "model", "max_model_len": CONTEXT}]}

        @app.get("/playground/state")
        def state() -> dict[str, Any]:
            return STATE | {"has_drafts": self.has_drafts}

        @app.post("/v1/chat/completions")
        async def chat(body: dict[str, Any]) -> Response:
            return self.answer(body, body["messages"][-1]["content"], is_chat=True)

        @app.post("/v1/completions")
        async def completion(body: dict[str, Any]) -> Response:
            return self.answer(body, body["prompt"], is_chat=False)

        @app.post("/tokenize")
        def tokenize(body: dict[str, Any]) -> dict[str, Any]:
            return {"count": len(body["prompt"].split()), "max_model_len": CONTEXT, "tokens": []}

        app.mount("/playground/static", StaticFiles(directory=FILES))
        return app

    def let_in(self, request: Request) -> None:
        """With a key, when it wants one; the page itself is open, as files are."""
        self.paths.append(request.url.path)
        has_key = request.headers.get("Authorization") == f"Bearer {KEY}"
        if self.wants_key and request.url.path != "/" and not has_key:
            raise PermissionError

    def answer(self, body: dict[str, Any], prompt: str, is_chat: bool) -> Response:
        """The prompt says what happens: `refuse` and `break` fail, `slowly` never ends, `say` is said again.

        Where there are tools, `weather` calls one. `at length` has a long explanation.
        """
        self.bodies.append(body)
        if len(body.get("messages", ())) > self.context_messages:
            return error(400, f"This model's maximum context length is {CONTEXT} tokens", "context_length_exceeded")
        if prompt == "refuse":
            return error(400, "<img src=x onerror=\"document.title='owned'\"> is wrong")
        chunks = self.chunks(body, prompt, is_chat)
        return StreamingResponse(chunks, media_type="text/event-stream")

    async def chunks(self, body: dict[str, Any], prompt: str, is_chat: bool) -> AsyncIterator[str]:
        count = 0

        def chunk(choice: dict[str, Any] | None) -> str:
            usage = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            choices = [] if choice is None else [{"index": 0, "finish_reason": None} | choice]
            return f"data: {json.dumps({'id': 'chatcmpl-one', 'choices': choices, 'usage': usage})}\n\n"

        ended = False
        try:
            yield ": keep-alive\n\n"
            if is_chat:
                yield chunk({"delta": {"role": "assistant", "content": ""}})
            if prompt == "weather" and body.get("tools"):
                for delta in CALL_DELTAS:
                    yield chunk({"delta": delta})
                yield chunk({"finish_reason": "tool_calls", "delta": {}})
                yield chunk(None)
                yield "data: [DONE]\n\n"
                ended = True
                return
            tokens = TOKENS if prompt != "slowly" else (b" word",) * 100_000
            if prompt.startswith("say "):
                text = prompt.removeprefix("say ").encode()
                tokens = tuple(text[i : i + 7] for i in range(0, len(text), 7))
            held = b""
            for token in tokens:
                count += 1
                await asyncio.sleep(0.005)
                held += b"" if token.startswith(b"<|") else token
                try:
                    text, held = held.decode(), b""
                except UnicodeDecodeError:
                    text = ""
                text = text.lstrip(" ") if count == 1 else text
                choice = chat_choice(text, token, body) if is_chat else text_choice(text, token, body)
                if body["stream_options"].get("include_draft_spans"):
                    choice["draft_spans"] = draft_spans(text, prompt)
                yield chunk(choice)
                if prompt == "break" and count == 3:
                    yield 'event: error\ndata: {"error": {"message": "the engine ended", "code": 500}}\n\n'
                    ended = True
                    return
            end = {"finish_reason": "length", "delta": {}, "text": ""}
            if body.get("explain"):
                explanation = long_explanation() if prompt == "at length" else hostile_report().explanations[1]
                end["explanation"] = json.loads(msgspec.json.encode(explanation))
            yield chunk(end)
            yield chunk(None)
            yield "data: [DONE]\n\n"
            ended = True
        finally:
            self.num_aborted += not ended


def chat_choice(text: str, token: bytes, body: dict[str, Any]) -> dict[str, Any]:
    """One token in the dialect of chats."""
    told = {"token": token.decode(errors="replace"), "logprob": -0.1054, "bytes": list(token)}
    other = {"token": " never", "logprob": -4.6052, "bytes": list(b" never")}
    logprobs = {"content": [told | {"top_logprobs": [told, other]}]} if body.get("logprobs") else None
    return {"delta": {"content": text}, "logprobs": logprobs}


def text_choice(text: str, token: bytes, body: dict[str, Any]) -> dict[str, Any]:
    """One token in the dialect of completions."""
    said = token.decode(errors="replace")
    told = {"tokens": [said], "token_logprobs": [-0.1054], "top_logprobs": [{said: -0.1054, " never": -4.6052}]}
    return {"text": text, "logprobs": told if "logprobs" in body else None}


def draft_spans(text: str, prompt: str) -> list[dict[str, Any]]:
    """What guesses wrote of a chunk: one of DRAFTS, or the end of each part of a text that is said again."""
    parts = [(text[:3], False), (text[3:], True)] if prompt.startswith("say ") else [(text, text in DRAFTS)]
    return [{"text": part, "accepted": accepted} for part, accepted in parts if part]


def error(status: int, message: str, code: str | None = None) -> JSONResponse:
    """OpenAI's shape."""
    return JSONResponse({"error": {"message": message, "code": code}}, status)


@contextmanager
def fake_server() -> Iterator[Fake]:
    """Serves on a free port of this machine, in a thread."""
    fake = Fake()
    with in_thread(fake.app(), log_level="warning", timeout_graceful_shutdown=1) as url:
        fake.url = f"{url}/"
        yield fake


if __name__ == "__main__":
    with fake_server() as served:
        print(served.url, flush=True)
        threading.Event().wait()
