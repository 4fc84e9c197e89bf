"""Runs a load of the simulator on a real engine, in this process and in real time."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.engine.engine import Engine
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.simulator.arrival import Arrival
from jaxvllm.simulator.ledger import Ledger
from jaxvllm.simulator.workload import Workload

# A loop without work sleeps no longer than this before it looks at the clock again.
_NAP = 0.0005


@dataclass(frozen=True)
class EngineRun:
    """The times of a load's requests on a real engine, and what each of them cost beside the steps."""

    ledger: Ledger
    request_seconds: float  # median time to queue a request


def run_on_engine(engine: Engine, workload: Workload) -> EngineRun:
    """Completes the whole load on `engine`, which is idle, as its server would: every token is streamed.

    Each request is queued as soon as the engine can look, from its arrival on. The prefix cache is empty at the start.
    A request that the engine refuses never ends, and so it counts as failed.
    """
    with frozen_heap():
        return _run(engine, workload)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps what is alive from the garbage collector, as the process of a server does: see `command_loop.serve`."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(engine: Engine, workload: Workload) -> EngineRun:
    engine.wait_until_compiled()
    engine.reset_prefix_cache()
    arrivals = list(workload.arrivals())
    requests = [_accepted(engine, str(number), arrival) for number, arrival in enumerate(arrivals)]
    ledger = Ledger(len(requests))
    seen: list[tuple[float, list[RequestOutput]]] = []
    queueing = []
    following = 0
    start = time.perf_counter()
    while following < len(requests) or engine.has_work:
        now = time.perf_counter() - start
        while following < len(requests) and arrivals[following].at <= now:
            request = requests[following]
            following += 1
            if request is not None:
                begin = time.perf_counter()
                engine.submit(request)
                queueing.append(time.perf_counter() - begin)
        if engine.has_work:
            if results := engine.step():
                seen.append((time.perf_counter() - start, results))
        elif following < len(requests):
            time.sleep(min(_NAP, max(arrivals[following].at - now, 0)))
    for number, arrival in enumerate(arrivals):
        ledger.arrive(number, arrival.at, arrival.num_prompt_tokens, arrival.answer.num_tokens)
    for at, results in seen:
        take_down(ledger, at, results)
    return EngineRun(ledger, float(np.median(queueing)) if queueing else 0.0)


def _accepted(engine: Engine, request_id: str, arrival: Arrival) -> GenerationRequest | None:
    """Returns the request of an arrival, or None for one that a simulation refuses, too."""
    if arrival.num_prompt_tokens + arrival.answer.num_tokens > engine.max_model_len:
        return None  # the engine would cut its answer
    try:
        return streamed(engine, request_id, arrival)
    except ParameterError:
        return None


def streamed(engine: Engine, request_id: str, arrival: Arrival) -> GenerationRequest:
    """Returns the request of an arrival, which yields exactly as many tokens as its answer has."""
    params = SamplingParams(
        ignore_eos=True, max_tokens=arrival.answer.num_tokens, output_kind=RequestOutputKind.DELTA, seed=0
    )
    tokens = arrival.tokens(engine.vocab_size).tolist()
    return engine.check(request_id, tokens, params)


def take_down(ledger: Ledger, at: float, results: Sequence[RequestOutput]) -> None:
    """Enters the outputs of a step that was read at the second `at`."""
    with_tokens = [result for result in results if result.outputs[0].token_ids]
    if with_tokens:
        numbers = np.array([int(result.request_id) for result in with_tokens])
        ledger.take(numbers, np.array([at]), sum(len(result.outputs[0].token_ids) for result in with_tokens))
    for result in results:
        if result.finished:
            ledger.end(int(result.request_id))
