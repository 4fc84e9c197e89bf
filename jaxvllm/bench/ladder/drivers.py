"""The ways in which a rung drives engines: plainly, without keeping KV, and with prompts on an engine of their own."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from jaxvllm.bench.ladder.run import KVUse, RungRun, TimedAnswer, mean_share
from jaxvllm.bench.ladder.workload import TEMPERATURE, Chat, TimedChats
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.exported_request import ExportedRequest
from jaxvllm.engine.outputs import RequestOutput

# How long an engine without work waits before it looks again for what may have come.
IDLE_SECONDS = 1e-3


class Driver(Protocol):
    """Completes a workload on engines that are idle, and leaves them idle."""

    def run(self, workload: TimedChats) -> RungRun: ...


class Transcript:
    """The tokens of a run, with the time at which each of them came."""

    def __init__(self, workload: TimedChats) -> None:
        self._chats = workload.chats
        self._tokens: list[list[int]] = [[] for _ in workload.chats]
        self._times: list[list[float]] = [[] for _ in workload.chats]
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._start

    def add(self, number: int, token_ids: Sequence[int]) -> None:
        """Adds tokens of chat `number` that have come now."""
        self._tokens[number] += token_ids
        self._times[number] += [self.now] * len(token_ids)

    def tokens(self, number: int) -> list[int]:
        return self._tokens[number]

    def answers(self) -> tuple[TimedAnswer, ...]:
        of_chats = zip(self._chats, self._tokens, self._times, strict=True)
        return tuple(TimedAnswer(chat.arrival, tuple(tokens), tuple(times)) for chat, tokens, times in of_chats)


class Meter:
    """Counts the steps of one engine, and watches its KV."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kv = KVUse()
        self.num_calls = 0
        self.num_steps = 0
        engine.take_reports()

    def step(self) -> list[RequestOutput]:
        """Takes a step of the engine."""
        outputs = self._engine.step()
        for report in self._engine.take_reports():
            self.num_calls += 1
            self.num_steps += report.num_steps
        for replica in self._engine.replicas:
            self.kv.look(replica.scheduler)
        return outputs


class Arrivals:
    """Hands out the chats of a workload as their time comes."""

    def __init__(self, workload: TimedChats) -> None:
        self._chats = list(enumerate(workload.chats))[::-1]

    @property
    def are_over(self) -> bool:
        return not self._chats

    def until(self, now: float) -> Iterator[tuple[int, Chat]]:
        """Takes the chats that have arrived by `now`, with their numbers."""
        while self._chats and self._chats[-1][1].arrival <= now:
            yield self._chats.pop()


def request(
    engine: Engine, chat: Chat, number: int, output: Sequence[int] = (), max_tokens: int | None = None
) -> GenerationRequest:
    """Returns the request for a chat, checked, which may have some of its `output` in its prompt already."""
    params = SamplingParams(
        temperature=TEMPERATURE,
        seed=chat.seed,
        max_tokens=max_tokens,  # None: as many as the model's length allows
        min_tokens=0 if output else 1,  # an answer without a token would have no time to its first one
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    return engine.check(str(number), [*chat.prompt_token_ids, *output], params)


def step_or_wait(
    engine: Engine, requests: Sequence[GenerationRequest], meter: Meter, arrivals: Arrivals, transcript: Transcript
) -> list[RequestOutput]:
    """Gives the engine the requests that have come, and returns what its next step yields; if it has none, it waits."""
    for number, _ in arrivals.until(transcript.now):
        engine.submit(requests[number])
    if not engine.has_work:
        time.sleep(IDLE_SECONDS)
        return []
    outputs = meter.step()
    for output in outputs:
        transcript.add(int(output.request_id), output.outputs[0].token_ids)
    return outputs


class Serving:
    """Hands the chats to one engine as they come, and lets it do the rest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, workload: TimedChats) -> RungRun:
        """Completes the chats. The prefix cache is empty when it begins."""
        engine = self._engine
        engine.reset_prefix_cache()
        requests = [request(engine, chat, number) for number, chat in enumerate(workload.chats)]
        meter, arrivals, transcript = Meter(engine), Arrivals(workload), Transcript(workload)
        while engine.has_work or not arrivals.are_over:
            step_or_wait(engine, requests, meter, arrivals, transcript)
        kv = meter.kv
        return RungRun(transcript.answers(), meter.num_calls, meter.num_steps, kv.wasted, kv.most_running)


class Recomputing:
    """Keeps no KV from token to token: each token is that of a new request, whose prompt is all that was said so far.

    A batch of `batch_size` chats is filled only when the last one has ended, and all of its chats get their next token
    together. The engine's prefix cache must be off.
    """

    def __init__(self, engine: Engine, batch_size: int) -> None:
        if engine.config.enable_prefix_caching:
            raise ValueError("an engine that finds prefixes keeps KV: turn enable_prefix_caching off")
        self._engine = engine
        self._batch_size = batch_size

    def run(self, workload: TimedChats) -> RungRun:
        """Completes the chats."""
        meter, arrivals, transcript = Meter(self._engine), Arrivals(workload), Transcript(workload)
        waiting: list[tuple[int, Chat]] = []
        most_running = 0
        while waiting or not arrivals.are_over:
            waiting += arrivals.until(transcript.now)
            if not waiting:
                time.sleep(IDLE_SECONDS)
                continue
            batch, waiting = waiting[: self._batch_size], waiting[self._batch_size :]
            most_running = max(most_running, len(batch))
            while batch:
                ended = self._next_tokens(batch, meter, transcript)
                batch = [(number, chat) for number, chat in batch if number not in ended]
        return RungRun(transcript.answers(), meter.num_calls, meter.num_steps, None, most_running)

    def _next_tokens(self, batch: Sequence[tuple[int, Chat]], meter: Meter, transcript: Transcript) -> set[int]:
        """Computes the next token of each chat, and returns those that end with it."""
        engine, ended = self._engine, set[int]()
        for number, chat in batch:
            engine.submit(request(engine, chat, number, transcript.tokens(number), max_tokens=1))
        lengths = {number: len(chat.prompt_token_ids) for number, chat in batch}
        while engine.has_work:
            for output in meter.step():
                number, completion = int(output.request_id), output.outputs[0]
                transcript.add(number, completion.token_ids)
                length = lengths[number] + len(transcript.tokens(number))
                if completion.finish_reason == "stop" or length >= engine.max_model_len:
                    ended.add(number)
        return ended


class Apart:
    """Computes prompts and first tokens on one engine, and moves each request to a second one for the other tokens.

    Each engine has a thread of its own, as it would have a machine of its own.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill = prefill
        self._decode = decode

    def run(self, workload: TimedChats) -> RungRun:
        """Completes the chats. The prefix caches are empty when it begins."""
        for engine in (self._prefill, self._decode):
            engine.reset_prefix_cache()
        meters = (Meter(self._prefill), Meter(self._decode))
        transcript, moving = Transcript(workload), _Moving()
        with ThreadPoolExecutor(2) as threads:
            done = [
                threads.submit(moving.guard, lambda: self._compute_prompts(workload, meters[0], transcript, moving)),
                threads.submit(moving.guard, lambda: self._go_on(meters[1], transcript, moving)),
            ]
        for future in done:
            future.result()
        first, second = meters
        return RungRun(
            transcript.answers(),
            first.num_calls + second.num_calls,
            first.num_steps + second.num_steps,
            mean_share([*first.kv.shares, *second.kv.shares]),
            first.kv.most_running + second.kv.most_running,
        )

    def _compute_prompts(self, workload: TimedChats, meter: Meter, transcript: Transcript, moving: "_Moving") -> None:
        engine, arrivals = self._prefill, Arrivals(workload)
        requests = [request(engine, chat, number) for number, chat in enumerate(workload.chats)]
        while (engine.has_work or not arrivals.are_over) and not moving.is_broken:
            for output in step_or_wait(engine, requests, meter, arrivals, transcript):
                if not output.finished:
                    moving.requests.put(engine.export_request(output.request_id))
        moving.is_over.set()

    def _go_on(self, meter: Meter, transcript: Transcript, moving: "_Moving") -> None:
        engine = self._decode
        while not moving.is_broken:
            # The order matters: what is put before the end is found after it.
            is_over = moving.is_over.is_set()
            with suppress(queue.Empty):
                while True:
                    engine.import_request(moving.requests.get_nowait())
            if engine.has_work:
                for output in meter.step():
                    transcript.add(int(output.request_id), output.outputs[0].token_ids)
            elif is_over:
                return
            else:
                time.sleep(IDLE_SECONDS)


class _Moving:
    """The requests on their way from one engine to the other, and how the two threads end."""

    def __init__(self) -> None:
        self.requests: queue.Queue[ExportedRequest] = queue.Queue()
        self.is_over = threading.Event()  # no other request is coming
        self._broken = threading.Event()

    @property
    def is_broken(self) -> bool:
        """Whether one of the threads has failed, so that the other must not wait for it."""
        return self._broken.is_set()

    def guard(self, work: Callable[[], None]) -> None:
        """Runs `work`, and tells the other thread if it fails."""
        try:
            work()
        except BaseException:
            self._broken.set()
            raise
