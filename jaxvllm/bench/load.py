"""Produces the load: it sends requests at their times and records all responses."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from jaxvllm.bench.http_client import ConnectionPool
from jaxvllm.bench.recording import Record, Recorder
from jaxvllm.bench.samples import BenchSample
from jaxvllm.client.server import Server


@dataclass(frozen=True)
class RequestTarget:
    """The parts of a request that do not depend on its sample. `endpoint` is a path of the OpenAI interface."""

    server: Server
    model: str
    endpoint: str
    is_chat: bool
    fields: dict[str, Any]  # sampling parameters, and other fields of every body

    def body(self, sample: BenchSample) -> dict[str, Any]:
        """Returns the request's JSON object."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body |= {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_len,
            }
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        return body | {"stream": True, "stream_options": {"include_usage": True}, **self.fields}

    def request(self, sample: BenchSample) -> bytes:
        """Returns the whole HTTP request. It is made before the run, so that nothing is encoded during the run."""
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
class LoadOutcome:
    """The records of all requests, in the order of sending."""

    records: tuple[Record, ...] = field(repr=False)  # asyncio.run takes the repr of what it returns
    duration: float  # seconds from the first request to the last response
    cpu_seconds: float  # CPU time of this program meanwhile


async def run_load(
    target: RequestTarget,
    samples: Sequence[BenchSample],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    when_done: Callable[[], object],
) -> LoadOutcome:
    """Sends each sample at its arrival (seconds, ascending) and waits until all are answered."""
    requests = [target.request(sample) for sample in samples]
    pool = ConnectionPool(target.server.base_url)
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def one(request: bytes, sample: BenchSample) -> Record:
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

    # The prompts are many long-lived objects, which the garbage collector would visit again and again.
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
    return LoadOutcome(tuple(task.result() for task in tasks), duration, time.process_time() - cpu)
