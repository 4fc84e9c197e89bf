"""The engine distributes requests among its replicas and steps them. It is single-threaded and synchronous."""

import logging
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Unpack

import numpy as np

from jaxvllm.config import EngineConfig
from jaxvllm.core.beam import BeamSearch
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.repetition import RepetitionDetector
from jaxvllm.core.request import GenerationRequest, QueueKey, Request, RequestOptions
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.burst_pace import OFFLINE_SECONDS
from jaxvllm.engine.kv_event_publisher import open_publishers
from jaxvllm.engine.multihost import lead
from jaxvllm.engine.output_processor import OutputProcessor, is_watched
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.replica import Replica
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.router import Router
from jaxvllm.engine.startup import StartupReport
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.grammar.request_constraints import without_tokenizer
from jaxvllm.runtime.logits_processors import LogitsProcessor
from jaxvllm.text.bad_words import read_bad_words
from jaxvllm.text.prompts import PromptLike, PromptReader, PromptRoom

logger = logging.getLogger(__name__)

# The interval of asking which of several replicas is done. While they have work, each device has its next step
# already, and asking eight takes 4% of a core.
POLL_SECONDS = 5e-4


class Engine:
    """Completes requests. Callers `submit` the requests that `check` accepted, then call `step` while `has_work`."""

    def __init__(
        self,
        config: EngineConfig,
        burst_seconds: float = OFFLINE_SECONDS,
        logits_processors: tuple[LogitsProcessor, ...] = (),
    ):
        """Loads the model and compiles the program that the first request needs.

        `burst_seconds`: the longest that several decode steps in one program may take, and a new request may wait.
        """
        # First, because a port that is in use should be told before a model is loaded.
        self._publishers = open_publishers(config.kv_events, config.mesh_shape.data, config.page_size)
        try:
            parts = lead(config, logits_processors)
        except BaseException:
            self._close_publishers()
            raise
        self._masks_commute = not logits_processors  # which may look at other tokens
        self.config = config
        self.tokenizer = parts.tokenizer
        self.tokenizer_directory = parts.tokenizer_directory
        self.vocab_size = parts.spec.vocab_size
        self.max_model_len = parts.max_model_len
        self.defaults = parts.defaults
        publishers = self._publishers or (None,) * len(parts.runners)
        self.replicas = tuple(
            Replica(i, parts.make_scheduler, runner, burst_seconds, publisher)
            for i, (runner, publisher) in enumerate(zip(parts.runners, publishers, strict=True))
        )
        self.outputs = self._make_outputs()
        self._reader = PromptReader(parts.tokenizer, parts.spec.vocab_size, parts.max_model_len)
        self.eos_token_ids = parts.eos_token_ids
        self._rules = RequestRules.of(config, parts.max_model_len, parts.eos_token_ids, self.vocab_size)
        self._constraints = parts.constraints
        self._arrivals = count()
        self._seeds = random.Random(config.seed)
        self._router = self._make_router()
        self._startup = parts.startup
        self._is_closed = False
        self._is_broken = False  # whether a step broke off whose remains are not cleared away yet
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
        *,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> GenerationRequest:
        """Checks everything that could be wrong with a request, without queueing it or changing anything.

        `options` are the optional fields of `GenerationRequest`, such as `priority`.
        Raises ValueError with the rule, the value and the way out.
        """
        read = self._reader.read(prompt, add_special_tokens=add_special_tokens, room=PromptRoom.of(params))
        request = GenerationRequest(request_id, read, params, **options)
        self._rules.check(request)
        read_bad_words(params.bad_words, self.tokenizer, self.vocab_size)
        self.check_fits(request)
        self._grammar(request)
        return request

    def prepare(self, request: GenerationRequest) -> Future[CompiledGrammar] | None:
        """Returns the grammar of a request as soon as it is compiled, or the ValueError in it. None if it has none.

        `submit` waits for it. A caller that must not wait calls this first, and submits the request when it is done.
        """
        params = request.params
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return None
        if self._constraints is None:
            raise without_tokenizer()
        return self._constraints.prepare(params)

    def check_fits(self, request: GenerationRequest) -> None:
        """Raises ValueError for a request that could not finish even if it had every page of a replica."""
        num_prompt_tokens = len(request.prompt.token_ids)
        num_beams = None if request.beam_search is None else request.beam_search.beam_width
        # All replicas are equal.
        self.replicas[0].scheduler.check_fits(num_prompt_tokens, self._rules.limit(request), num_beams)

    def _grammar(self, request: GenerationRequest) -> CompiledGrammar | None:
        """Waits for the grammar of `request`, if it has one. Raises ValueError for a wrong one."""
        future = self.prepare(request)
        try:
            return None if future is None else future.result()
        except ParameterError as error:  # others raise the same instance, and callers add to its text
            raise ParameterError(str(error), error.param) from error

    def submit(self, request: GenerationRequest) -> None:
        """Queues a checked request, once its grammar is compiled, if it has one.

        Raises ValueError when its id is in use or its grammar is wrong, and RuntimeError after `close`.
        """
        self._ready()
        grammar = self._grammar(request)
        sequences = request.sequences()
        for name in (request.request_id, *(sequence.request_id for sequence in sequences)):
            if self.outputs.is_known(name):
                raise ParameterError(f"request id {name!r} is in use: choose another", "request_id")
        warnings = () if grammar is None else grammar.warnings
        self.outputs.add(request, [sequence.request_id for sequence in sequences], time.monotonic(), warnings)
        self._num_prompt_tokens += len(request.prompt.token_ids)
        queued = [self._queued(sequence, grammar) for sequence in sequences]
        scheduler = self._router.choose(queued[0])  # the same for all of them, so that they share the prompt's pages
        for one in queued:
            scheduler.add(one, watched=is_watched(request))

    def step(self) -> list[RequestOutput]:
        """Dispatches each replica's next step, reads the step before it, and returns the outputs for callers.

        Replicas do not wait for each other: when several compute, only those that are done are read.

        If an exception breaks the step off, Ctrl-C included, all requests of all replicas and the prefix caches are
        dropped: host and device may have stopped at different points, and the cache must never hold a page that was
        not computed. Raises RuntimeError after `close`.
        """
        self._ready()
        try:
            return self._step()
        except BaseException:
            self._is_broken = True
            try:
                self._reset()
            except Exception:  # the error that broke the step off is raised; `_ready` tries again and raises this one
                logger.exception("the engine could not be reset")
            raise

    def _step(self) -> list[RequestOutput]:
        for replica in self.replicas:
            replica.dispatch(self.outputs)
        results = [result for replica in self._to_collect() for result in replica.collect(self.outputs)]
        if not self._startup.is_over and any(replica.num_output_tokens for replica in self.replicas):
            self._startup.first_token()
            logger.info("%s", self.startup())
        return results

    def _to_collect(self) -> list[Replica]:
        """Returns the replicas whose oldest step must be read now: of several, those that are done, so none waits."""
        busy = [replica for replica in self.replicas if replica.is_busy]
        due = [replica for replica in busy if replica.is_due]
        if len(busy) < 2:
            return due
        while not (ready := [replica for replica in due if replica.is_ready]) and len(due) == len(busy):
            time.sleep(POLL_SECONDS)
        return ready

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now, frees its pages and returns its last output; None if it is unknown or has ended."""
        if request_id not in self.outputs:
            return None
        ended = [
            replica.scheduler.finish(child_id)
            for child_id in self.outputs.children(request_id)
            for replica in self.replicas  # only one of them has it
        ]
        for replica in self.replicas:
            replica.publish()
        return self.outputs.abort(request_id, [child for child in ended if child is not None])

    def startup(self) -> StartupReport:
        """Returns where the time of the start went."""
        return self._startup.report()

    def stats(self) -> EngineStats:
        """Returns counters and gauges that say how busy the engine is."""
        schedulers = [replica.scheduler for replica in self.replicas]
        drafted = np.sum([replica.num_drafted for replica in self.replicas], axis=0)
        accepted = np.sum([replica.num_accepted for replica in self.replicas], axis=0)
        return EngineStats(
            num_steps=sum(replica.num_steps for replica in self.replicas),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=sum(replica.num_output_tokens for replica in self.replicas),
            num_preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
            num_prefix_queries=sum(replica.num_prefix_queries for replica in self.replicas),
            num_prefix_hits=sum(replica.num_prefix_hits for replica in self.replicas),
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
            num_pages=sum(scheduler.cache.num_pages for scheduler in schedulers),
            num_pages_owned=sum(scheduler.cache.num_owned for scheduler in schedulers),
            num_programs=sum(replica.runner.programs.num_compiled for replica in self.replicas),
            num_bucket_tokens=sum(replica.num_bucket_tokens for replica in self.replicas),
            num_padding_tokens=sum(replica.num_padding_tokens for replica in self.replicas),
            num_ended_tokens=sum(replica.num_ended_tokens for replica in self.replicas),
            num_bucket_rows=sum(replica.num_bucket_rows for replica in self.replicas),
            num_padding_rows=sum(replica.num_padding_rows for replica in self.replicas),
            num_drafts=int(drafted[:1].sum()),
            num_draft_tokens=int(drafted.sum()),
            num_accepted_tokens=int(accepted.sum()),
            num_accepted_per_pos=tuple(accepted.tolist()),
        )

    def take_reports(self) -> list[StepReport]:
        """Returns reports of the steps read since the last call: at most the `MAX_REPORTS` latest of each replica."""
        return [report for replica in self.replicas for report in replica.take_reports()]

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix. Running requests keep their pages."""
        for replica in self.replicas:
            replica.scheduler.cache.reset_prefix_cache()
            replica.publish()

    def wait_until_compiled(self) -> None:
        """Blocks until every bucket of every replica is compiled. Nothing compiles afterwards."""
        for replica in self.replicas:
            replica.runner.programs.wait()

    def close(self) -> None:
        """Stops background work and frees the device's memory. The engine takes no request afterwards."""
        self._is_closed = True
        if self._constraints is not None:
            self._constraints.close()
        # They close at the same time because each waits for the bucket that it is compiling.
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            list(threads.map(lambda replica: replica.runner.close(), self.replicas))
        self._close_publishers()

    def _close_publishers(self) -> None:
        for publisher in self._publishers:
            publisher.close()

    def _ready(self) -> None:
        """Raises RuntimeError after `close`. Resets after a broken-off step, if resetting failed at that time."""
        if self._is_closed:
            raise RuntimeError("this engine is closed: build another")
        if self._is_broken:
            self._reset()

    def _reset(self) -> None:
        # The host's side of all replicas comes first: even if a device fails, no request may be left half known.
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
        return Router((replica.scheduler for replica in self.replicas), self.config.routing_policy)

    def _queued(self, sequence: GenerationRequest, grammar: CompiledGrammar | None) -> Request:
        """Returns a sequence's request for the scheduler. Seed and place in the queue do not depend on the routing."""
        seed, limit = sequence.params.seed, self._rules.limit(sequence)
        num_prompt_tokens = len(sequence.prompt.token_ids)
        detection, beams = sequence.params.repetition_detection, sequence.beam_search
        return Request(
            asked=sequence,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            stop_token_ids=self._rules.stop_token_ids(sequence.params),
            limit=limit,
            key=QueueKey(sequence.priority, next(self._arrivals)),
            eos_token_ids=self._rules.eos_token_ids,
            masks_commute=self._masks_commute,
            constraint=None if self._constraints is None else self._constraints.constraint(sequence, grammar),
            bad_word_ids=read_bad_words(sequence.params.bad_words, self.tokenizer, self.vocab_size),
            repetition=None if detection is None else RepetitionDetector(detection, limit - num_prompt_tokens),
            search=None if beams is None else BeamSearch(beams, num_prompt_tokens, limit, self.eos_token_ids),
        )
