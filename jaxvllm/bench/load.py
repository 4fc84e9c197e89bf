"""The load itself: requests sent at their times, every response listened to."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from jaxvllm.bench.connection import ConnectionPool
from jaxvllm.bench.recording import Record, Recorder
from jaxvllm.bench.samples import Sample
from jaxvllm.client.server import Server


@dataclass(frozen=True)
class Target:
    """What is asked of the server beside the prompt. `endpoint` is a path of its OpenAI interface."""

    server: Server
    model: str
    endpoint: str
    is_chat: bool
    fields: dict[str, Any]  # sampling, and whatever else every body holds

    def body(self, sample: Sample) -> dict[str, Any]:
        """The request's JSON object."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body |= {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_len,
            }
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        return body | {"stream": True, "stream_options": {"include_usage": True}, **self.fields}

    def request(self, sample: Sample) -> bytes:
        """The whole HTTP request. Made before the run: during it, nothing is encoded."""
        content = msgspec.json.encode(self.body(sample))
        address = urlsplit(self.server.base_url)
        headers = {
            "Host": address.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Content-Length": str(len(content)),
            **self.server.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {address.path}{self.endpoint} HTTP/1.1\r\n{lines}\r\n".encode("ascii") + content


@dataclass(frozen=True)
class Outcome:
    """All requests, in the order of sending."""

    records: tuple[Record, ...] = field(repr=False)  # asyncio.run takes the repr of what it returns
    duration: float  # seconds from the first request to the last response
    cpu_seconds: float  # that this program computed meanwhile


async def run_load(
    target: Target,
    samples: Sequence[Sample],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    when_done: Callable[[], object],
) -> Outcome:
    """Sends each sample at its arrival (seconds, ascending) and listens until all are answered."""
    requests = [target.request(sample) for sample in samples]
    pool = ConnectionPool(target.server.base_url)
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def one(request: bytes, sample: Sample) -> Record:
        arrived = time.perf_counter()
        async with places:
            start = time.perf_counter()
            recorder = Recorder(start, start - arrived, sample.prompt_len)
            error: Exception | None = None
            try:
                await pool.exchange(request, recorder)
            except Exception as failure:
                error = failure
        when_done()
        return recorder.record(error)

    # The prompts are many objects that stay: the collector would visit them again and again.
    gc.collect()
    gc.freeze()
    cpu, start = time.process_time(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, sample, arrival in zip(requests, samples, arrivals, strict=True):
                if (wait := start + arrival - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(request, sample)))
    finally:
        pool.close()
        gc.unfreeze()
    duration = time.perf_counter() - start
    return Outcome(tuple(task.result() for task in tasks), duration, time.process_time() - cpu)
