"""Batch files as OpenAI defines them: each line is a request, or in the output an answer."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import httpx

from jaxvllm.client.api import TIMEOUT, network_errors
from jaxvllm.client.errors import ServerError
from jaxvllm.client.server import Server

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
# The number of tries for a request. A full server says when to try again, but after this many it is taken for broken.
TRIES = 8
PAUSE = 1.0  # seconds between tries when the server does not say


class BadLine(ValueError):
    """Raised for a line that is no valid request. `code` is OpenAI's name for the error."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchAnswer:
    """One line of the output: the server's answer with any status, or the reason why there is none."""

    custom_id: str | None
    status: int | None = None
    request_id: str = ""
    body: Any = None
    error: tuple[str, str] | None = None  # code and message

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.status == 200

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt, cached ones included, or 0 when the answer does not say."""
        usage = self._usage
        if "prompt_tokens" in usage:
            return usage["prompt_tokens"]
        # OpenAI's input tokens include the cached ones. Anthropic counts those separately, under other names.
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(usage.get(name, 0) for name in parts)

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens of the answer, or 0 when the answer does not say."""
        return self._usage.get("completion_tokens") or self._usage.get("output_tokens", 0)

    @property
    def _usage(self) -> dict[str, int]:
        """The counts of the answer's `usage`."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        return {name: n for name, n in usage.items() if isinstance(n, int)} if isinstance(usage, dict) else {}

    def line(self) -> str:
        """Returns the line as JSON."""
        response = None
        if self.error is None:
            response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        error = None if self.error is None else {"code": self.error[0], "message": self.error[1]}
        answer = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(answer, ensure_ascii=False)


@dataclass(frozen=True)
class BatchTotals:
    """The totals of a file. Tokens are those that the server counted."""

    num_ok: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.num_ok + self.num_failed} requests, {self.num_ok} ok, {self.num_failed} failed, "
            f"{self.num_prompt_tokens} tokens in, {self.num_output_tokens} tokens out, {self.seconds:.2f} s"
        )


class BatchReader:
    """Reads and checks lines one by one. Each `custom_id` may occur only once."""

    def __init__(self, model: str):
        self._model = model
        self._seen: set[str] = set()

    def read(self, line: str) -> BatchRequest:
        """Returns the request of a line, with `model` if its body names no model. Raises BadLine for a wrong line."""
        entry = _object(line)
        custom_id = entry.get("custom_id")
        if not isinstance(custom_id, str):
            raise BadLine("missing_required_parameter", "custom_id must be a string")
        if custom_id in self._seen:
            raise BadLine("duplicate_custom_id", f"custom_id {custom_id} is that of an earlier line")
        self._seen.add(custom_id)
        if entry.get("method") != "POST":
            raise BadLine("invalid_method", f"method must be POST, not {entry.get('method')}")
        if entry.get("url") not in URLS:
            raise BadLine("invalid_url", f"url must be one of {', '.join(URLS)}, not {entry.get('url')}")
        body = entry.get("body")
        if not isinstance(body, dict):
            raise BadLine("missing_required_parameter", "body must be an object")
        if body.get("stream"):
            raise BadLine("invalid_request", "a batch cannot stream: leave stream out")
        return BatchRequest(custom_id, entry["url"], {"model": self._model, **body})


class BatchRunner:
    """Sends the requests of a file, several at a time, and writes the answers in the order of the lines."""

    def __init__(self, server: Server, reader: BatchReader, max_concurrency: int, when_done: Callable[[], object]):
        self._server = server
        self._reader = reader
        self._max_concurrency = max_concurrency
        self._when_done = when_done

    async def run(self, lines: Sequence[str], output: TextIO) -> BatchTotals:
        """Answers the lines and returns the totals. It writes an answer as soon as all earlier ones are written."""
        start = time.perf_counter()
        num_failed = num_prompt_tokens = num_output_tokens = 0
        waiting: dict[int, BatchAnswer] = {}
        next_line = 0
        limits = httpx.Limits(max_connections=self._max_concurrency)
        server = self._server
        async with httpx.AsyncClient(
            base_url=server.base_url, headers=server.headers, timeout=TIMEOUT, limits=limits
        ) as client:
            numbered = iter(enumerate(lines))

            async def work() -> None:
                nonlocal next_line, num_failed, num_prompt_tokens, num_output_tokens
                for index, line in numbered:
                    waiting[index] = answer = await self._answer(client, line)
                    num_failed += not answer.succeeded
                    num_prompt_tokens += answer.num_prompt_tokens
                    num_output_tokens += answer.num_output_tokens
                    while next_line in waiting:
                        output.write(waiting.pop(next_line).line() + "\n")
                        next_line += 1
                    output.flush()
                    self._when_done()

            await asyncio.gather(*(work() for _ in range(min(self._max_concurrency, len(lines)))))
        seconds = time.perf_counter() - start
        return BatchTotals(len(lines) - num_failed, num_failed, num_prompt_tokens, num_output_tokens, seconds)

    async def _answer(self, client: httpx.AsyncClient, line: str) -> BatchAnswer:
        try:
            request = self._reader.read(line)
        except BadLine as error:
            return BatchAnswer(_custom_id(line), error=(error.code, str(error)))
        try:
            response = await self._send(client, request)
        except ServerError as error:
            return BatchAnswer(request.custom_id, error=("server_error", str(error)))
        try:
            body = response.json()
        except ValueError:
            body = response.text
        request_id = response.headers.get("x-request-id") or (body.get("id", "") if isinstance(body, dict) else "")
        return BatchAnswer(request.custom_id, response.status_code, request_id, body)

    async def _send(self, client: httpx.AsyncClient, request: BatchRequest) -> httpx.Response:
        for tries_left in reversed(range(TRIES)):
            with network_errors(self._server.base_url):
                response = await client.post(request.url, json=request.body)
            if not tries_left or response.status_code not in (429, 503):
                break
            wait = response.headers.get("retry-after", "")
            await asyncio.sleep(float(wait) if wait.isdecimal() else PAUSE)
        return response


def _object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise BadLine("invalid_json_line", "the line must be a JSON object")
    return entry


def _custom_id(line: str) -> str | None:
    """Returns the id of a line that is otherwise wrong, or None if it has no id."""
    try:
        custom_id = _object(line).get("custom_id")
    except BadLine:
        return None
    return custom_id if isinstance(custom_id, str) else None
