"""The engine: checks requests, shares them out among its replicas, and steps those. Single-threaded and synchronous."""

import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.slots import MAX_STOP_IDS
from jaxvllm.engine.hosts import lead
from jaxvllm.engine.output_processor import OutputProcessor, child_request_ids, is_watched
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.prompts import Prompt, PromptLike, PromptReader
from jaxvllm.engine.replica import Replica
from jaxvllm.engine.router import Router
from jaxvllm.engine.stats import EngineStats, StepReport

logger = logging.getLogger(__name__)

# How often to ask which of several replicas is done. While they have work, each device has its next step already, and
# asking eight takes 4% of a core.
POLL_SECONDS = 5e-4


@dataclass(frozen=True)
class Submission:
    """A request that was checked against the engine and is ready to be queued."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int


class Engine:
    """Completes requests: `submit` what `check` accepted, then call `step` while `has_work`."""

    def __init__(self, config: EngineConfig):
        """Loads the model and compiles what the first request needs."""
        parts = lead(config)
        self.config = config
        self.tokenizer = parts.tokenizer
        self.tokenizer_directory = parts.tokenizer_directory
        self.vocab_size = parts.spec.vocab_size
        self.max_model_len = parts.max_model_len
        self.default_params = parts.default_params
        self.replicas = tuple(Replica(i, parts.make_scheduler, runner) for i, runner in enumerate(parts.runners))
        self.outputs = self._make_outputs()
        self._reader = PromptReader(parts.tokenizer, parts.spec.vocab_size, parts.max_model_len)
        self._eos_token_ids = parts.eos_token_ids
        self._arrivals = count()
        self._seeds = random.Random(config.seed)
        self._router = self._make_router()
        self._is_closed = False
        self._is_broken = False  # a step broke off, and what it left behind is not cleared away yet
        self._num_prompt_tokens = 0

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def has_work(self) -> bool:
        return any(replica.has_work for replica in self.replicas)

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
            raise ParameterError(f"priority must be an integer, not {priority!r}", "priority")
        if priority and self.config.scheduling_policy != "priority":
            raise ParameterError(f"priority {priority} needs an engine with scheduling_policy='priority'", "priority")
        read = self._reader.read(prompt, add_special_tokens=add_special_tokens, scores_only=params.scores_only)
        if len(self._stop_ids(params)) > MAX_STOP_IDS:
            raise ParameterError(
                f"EOS and stop_token_ids are more than {MAX_STOP_IDS} tokens together: give fewer", "stop_token_ids"
            )
        self.replicas[0].scheduler.check_fits(len(read.token_ids), self._limit(read, params))  # all are equal
        return Submission(request_id, read, params, priority)

    def submit(self, submission: Submission) -> None:
        """Queues a checked request. Raises ValueError when its id is in use, RuntimeError after `close`."""
        self._ready()
        request_id, prompt, params = submission.request_id, submission.prompt, submission.params
        children = child_request_ids(request_id, params.n)
        for name in (request_id, *children):
            if self.outputs.is_known(name):
                raise ParameterError(f"request id {name!r} is in use: choose another", "request_id")
        self.outputs.add(request_id, prompt, params, children, time.monotonic())
        self._num_prompt_tokens += len(prompt.token_ids)
        requests = [
            self._request(child_id, prompt, params.child(index), submission.priority)
            for index, child_id in enumerate(children)
        ]
        scheduler = self._router.choose(requests[0])  # one for all of them: they share the pages of their prompt
        for request in requests:
            scheduler.add(request, watched=is_watched(params))

    def step(self) -> list[RequestOutput]:
        """Dispatches each replica's next step, and reads the one before it. Returns what the tokens mean to callers.

        Replicas do not wait for each other: where several compute, those that are done are read.

        When anything breaks it off, Ctrl-C included, every request of every replica is dropped and the prefix caches
        with them: host and device may have stopped at different points, and a page must never be found that was not
        computed. RuntimeError after `close`.
        """
        self._ready()
        try:
            return self._step()
        except BaseException:
            self._is_broken = True
            try:
                self._reset()
            except Exception:  # what broke the step off is told; `_ready` tries again, and tells of this
                logger.exception("the engine could not be reset")
            raise

    def _step(self) -> list[RequestOutput]:
        for replica in self.replicas:
            replica.dispatch(self.outputs)
        return [result for replica in self._to_collect() for result in replica.collect(self.outputs)]

    def _to_collect(self) -> list[Replica]:
        """The replicas whose oldest step must be read now: of several, those that are done, so that none waits."""
        busy = [replica for replica in self.replicas if replica.is_busy]
        due = [replica for replica in busy if replica.is_due]
        if len(busy) < 2:
            return due
        while not (ready := [replica for replica in due if replica.is_ready]) and len(due) == len(busy):
            time.sleep(POLL_SECONDS)
        return ready

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now and frees its pages; None when it is unknown or has ended."""
        if request_id not in self.outputs:
            return None
        ended = [
            replica.scheduler.finish(child_id)
            for child_id in self.outputs.children(request_id)
            for replica in self.replicas  # only one knows it
        ]
        return self.outputs.abort(request_id, [child for child in ended if child is not None])

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        schedulers = [replica.scheduler for replica in self.replicas]
        return EngineStats(
            num_steps=sum(replica.num_steps for replica in self.replicas),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=sum(replica.num_output_tokens for replica in self.replicas),
            num_preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
            num_prefix_queries=sum(replica.num_prefix_queries for replica in self.replicas),
            num_prefix_hits=sum(replica.num_prefix_hits for replica in self.replicas),
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
            num_pages=sum(scheduler.pool.num_pages - 1 for scheduler in schedulers),
            num_pages_owned=sum(scheduler.pool.num_owned for scheduler in schedulers),
            num_programs=sum(replica.runner.programs.num_compiled for replica in self.replicas),
        )

    def take_reports(self) -> list[StepReport]:
        """The steps that were read since the last call: at most the `MAX_REPORTS` latest of each replica."""
        return [report for replica in self.replicas for report in replica.take_reports()]

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests keep their pages."""
        for replica in self.replicas:
            replica.scheduler.pool.reset_prefix_cache()

    def wait_until_compiled(self) -> None:
        """Blocks until every bucket of every replica is compiled; nothing compiles after."""
        for replica in self.replicas:
            replica.runner.programs.wait()

    def close(self) -> None:
        """Stops background work and frees the device's memory. The engine takes no request afterwards."""
        self._is_closed = True
        # All at once: each waits for the bucket that it is compiling.
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            list(threads.map(lambda replica: replica.runner.close(), self.replicas))

    def _ready(self) -> None:
        """Raises RuntimeError after `close`. Clears up after a step that broke off, if that did not succeed then."""
        if self._is_closed:
            raise RuntimeError("this engine is closed: build another")
        if self._is_broken:
            self._reset()

    def _reset(self) -> None:
        # The host's side of all replicas first: whatever happens to a device, no request may be left half known.
        for replica in self.replicas:
            replica.drop()
        self.outputs = self._make_outputs()
        self._router = self._make_router()
        for replica in self.replicas:
            replica.runner.reset()
        self._is_broken = False

    def _make_outputs(self) -> OutputProcessor:
        return OutputProcessor(self.tokenizer, self.config.max_outputs_per_second)

    def _make_router(self) -> Router:
        return Router(replica.scheduler for replica in self.replicas)

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> Request:
        """One sequence for a scheduler. Seeds and places in the queue are drawn here, so no routing can change them."""
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            stop_token_ids=self._stop_ids(params),
            limit=self._limit(prompt, params),
            key=QueueKey(priority, next(self._arrivals)),
            salt=prompt.cache_salt,
        )

    def _limit(self, prompt: Prompt, params: SamplingParams) -> int:
        if params.scores_only:
            return len(prompt.token_ids) + 1  # the step that ends a prompt samples a token, which nobody is told of
        longest = self.max_model_len
        return longest if params.max_tokens is None else min(longest, len(prompt.token_ids) + params.max_tokens)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
