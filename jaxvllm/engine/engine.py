"""The engine: schedule, dispatch, and one step later collect, update, process. Single-threaded and synchronous."""

import random
import time
from collections import deque
from dataclasses import dataclass
from itertools import count

from jaxvllm.config import EngineConfig
from jaxvllm.core.request import QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.slots import MAX_STOP_IDS
from jaxvllm.engine.build import build
from jaxvllm.engine.output_processor import OutputProcessor, child_request_ids, is_watched
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.prompts import Prompt, PromptLike, PromptReader
from jaxvllm.runtime.runner import InFlight

# Steps on the device before the host must have read the oldest's output. With two, the device computes step N + 1
# while the host reads step N and plans step N + 2.
DEPTH = 2


@dataclass(frozen=True)
class Submission:
    """A request that was checked against the engine and is ready to be queued."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built, and gauges of now."""

    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_owned: int
    num_programs: int


class Engine:
    """Completes requests: `submit` what `check` accepted, then call `step` while `has_work`."""

    def __init__(self, config: EngineConfig):
        """Loads the model and compiles what the first request needs."""
        parts = build(config)
        self.config = config
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.default_params = parts.default_params
        self._make_scheduler = parts.make_scheduler
        self.scheduler = parts.make_scheduler()
        self.runner = parts.runner
        self.outputs = OutputProcessor(parts.tokenizer)
        self._reader = PromptReader(parts.tokenizer, parts.spec.vocab_size, parts.max_model_len)
        self._eos_token_ids = parts.eos_token_ids
        self._arrivals = count()
        self._seeds = random.Random(config.seed)
        self._in_flight: deque[InFlight] = deque()
        self._closed = False
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def check(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> Submission:
        """Checks everything that could be wrong with a request; nothing is queued and nothing changes.

        Raises ValueError with the rule, the value and the way out.
        """
        if type(priority) is not int:
            raise ValueError(f"priority must be an integer, not {priority!r}")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority {priority} needs an engine with scheduling_policy='priority'")
        read = self._reader.read(prompt, add_special_tokens=add_special_tokens)
        if len(self._stop_ids(params)) > MAX_STOP_IDS:
            raise ValueError(f"EOS and stop_token_ids are more than {MAX_STOP_IDS} tokens together: give fewer")
        self.scheduler.check_fits(len(read.token_ids), self._limit(read, params))
        return Submission(request_id, read, params, priority)

    def submit(self, submission: Submission) -> None:
        """Queues a checked request. Raises ValueError when its id is in use, RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this engine is closed: build another")
        request_id, prompt, params = submission.request_id, submission.prompt, submission.params
        children = child_request_ids(request_id, params.n)
        for name in (request_id, *children):
            if self.outputs.is_known(name):
                raise ValueError(f"request id {name!r} is in use: choose another")
        self.outputs.add(request_id, prompt, params, children, time.monotonic())
        self._num_prompt_tokens += len(prompt.token_ids)
        for index, child_id in enumerate(children):
            child = params.child(index)
            request = Request(
                request_id=child_id,
                prompt_token_ids=prompt.token_ids,
                sampling_params=child,
                seed=self._seeds.getrandbits(63) if child.seed is None else child.seed,
                stop_token_ids=self._stop_ids(child),
                limit=self._limit(prompt, child),
                key=QueueKey(submission.priority, next(self._arrivals)),
                salt=prompt.cache_salt,
            )
            self.scheduler.add(request, watched=is_watched(params))

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, and reads the one before it. Returns what its tokens mean to callers.

        When anything breaks it off, Ctrl-C included, every request is dropped and the prefix cache with them: host and
        device may have stopped at different points, and a page must never be found that was not computed.
        """
        try:
            return self._step()
        except BaseException:
            self._reset()
            raise

    def _step(self) -> list[RequestOutput]:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.outputs.scheduled(plan)
            self._in_flight.append(self.runner.dispatch(plan))
            self._num_steps += 1
        if not self._in_flight or (plan is not None and len(self._in_flight) < DEPTH):
            return []
        done = self._in_flight.popleft()
        output = self.runner.collect(done)
        update = self.scheduler.update(done.plan, output)
        self._num_output_tokens += update.num_new_tokens
        results, stopped = self.outputs.process(update, output)
        for request_id in stopped:
            self.scheduler.finish(request_id)
        return results

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now and frees its pages; None when it is unknown or has ended."""
        if request_id not in self.outputs:
            return None
        children = [self.scheduler.finish(child_id) for child_id in self.outputs.children(request_id)]
        return self.outputs.abort(request_id, [child for child in children if child is not None])

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        pool = self.scheduler.pool
        return EngineStats(
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_pages=pool.num_pages - 1,
            num_pages_owned=pool.num_owned,
            num_programs=self.runner.programs.num_compiled,
        )

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests keep their pages."""
        self.scheduler.pool.reset_prefix_cache()

    def close(self) -> None:
        """Stops background work and frees the device's memory. The engine takes no request afterwards."""
        self._closed = True
        self.runner.close()

    def _reset(self) -> None:
        self._in_flight.clear()
        self.scheduler = self._make_scheduler()
        self.outputs = OutputProcessor(self.tokenizer)
        self.runner.reset()

    def _limit(self, prompt: Prompt, params: SamplingParams) -> int:
        longest = self.max_model_len
        return longest if params.max_tokens is None else min(longest, len(prompt.token_ids) + params.max_tokens)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
