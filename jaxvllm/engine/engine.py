"""The engine distributes requests among its replicas and steps them. It is single-threaded and synchronous."""

import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from jaxvllm.config import EngineConfig
from jaxvllm.core.beam import BeamSearch
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.explanation import Trail
from jaxvllm.core.lora import LoraAdapter, LoRARequest, salt_without_adapter
from jaxvllm.core.pause import SLEEP_LEVELS, PauseMode, PauseState, SleepTag
from jaxvllm.core.repetition import RepetitionDetector
from jaxvllm.core.request import GenerationRequest, QueueKey, Request, RequestOptions
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.token_constraint import GuardedConstraint
from jaxvllm.core.weight_version import KVChange, WeightVersion, begin_version, check_kv_change
from jaxvllm.engine.burst_pace import OFFLINE_SECONDS
from jaxvllm.engine.decode_pace import DecodePace
from jaxvllm.engine.engine_sleep import EngineSleep
from jaxvllm.engine.expert_balancer import ExpertBalancer, LoadMeter
from jaxvllm.engine.exported_request import ExportedRequest, SamplingState
from jaxvllm.engine.kv_event_publisher import open_publishers
from jaxvllm.engine.live_request import is_watched
from jaxvllm.engine.lora_store import LoraStore
from jaxvllm.engine.multihost import lead
from jaxvllm.engine.new_weights import WeightSource, new_weights
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.page_cargo import load_cargo, unload_cargo
from jaxvllm.engine.replica import DEPTH, DEPTH_IN_TURNS, Replica
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.rounds import Rounds
from jaxvllm.engine.router import Router
from jaxvllm.engine.startup import StartupReport
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.grammar.request_constraints import without_tokenizer
from jaxvllm.kv_transfer.page_format import PageFormat
from jaxvllm.models.attention import KV_SCALES
from jaxvllm.models.experts import num_experts
from jaxvllm.models.lora import LORA
from jaxvllm.models.params import Params
from jaxvllm.runtime.logits_processors import LogitsProcessor
from jaxvllm.runtime.runner import Runner
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
        self._publishers = open_publishers(
            config.kv_events, config.mesh_shape.data, config.page_size, config.data_parallel_rank
        )
        try:
            parts = lead(config, logits_processors)
        except BaseException:
            self._close_publishers()
            raise
        self._masks_commute = not logits_processors  # which may look at other tokens
        self.config = config
        self.tokenizer = parts.tokenizer
        self.tokenizer_directory = parts.tokenizer_directory
        self.spec = parts.spec
        self.vocab_size = parts.spec.vocab_size
        self._num_experts = num_experts(parts.spec)
        self.max_model_len = parts.max_model_len
        self.defaults = parts.defaults
        self.pooler = parts.pooler
        self._connector = parts.connector
        self._page_format = parts.page_format
        self.holders = parts.holders  # of weights, pages and programs
        self._read_weights = parts.read_weights
        self.weight_version = WeightVersion()
        self._loras = None
        if parts.read_adapter is not None:
            self._loras = LoraStore(parts.read_adapter, config.max_cpu_loras or config.max_loras)
        self._meters = tuple(LoadMeter(holder) for holder in parts.holders if holder.load_shape is not None)
        self._balancers: tuple[ExpertBalancer, ...] = ()
        if config.eplb is not None:
            of_holders = zip(parts.holders, self._meters, strict=True)
            self._balancers = tuple(ExpertBalancer(config.eplb, holder, meter) for holder, meter in of_holders)
        nothing = (None,) * len(parts.runners)
        balancers = self._balancers if parts.lockstep is None and self._balancers else nothing
        depth = DEPTH if config.async_scheduling else DEPTH_IN_TURNS
        of_replicas = zip(parts.runners, parts.traffic, self._publishers or nothing, balancers, strict=True)
        paces = [DecodePace(holder, burst_seconds) for holder in parts.holders]
        paces *= len(parts.runners) // len(paces)
        self.replicas = tuple(
            Replica(i, parts.make_scheduler, runner, paces[i], traffic, publisher, depth, balancer)
            for i, (runner, traffic, publisher, balancer) in enumerate(of_replicas)
        )
        self._rounds = None
        if parts.lockstep is not None:
            self._rounds = Rounds(parts.lockstep, self.replicas, paces[0], depth, self._balancers)
        self._sleep = EngineSleep(self.replicas, self.holders, self._meters)
        self._early: list[RequestOutput] = []  # outputs that the next step returns
        self.outputs = self._make_outputs()
        self._reader = PromptReader(parts.tokenizer, parts.spec.vocab_size, parts.max_model_len)
        self.eos_token_ids = parts.eos_token_ids
        self.side_inputs = parts.side_inputs
        rules = (parts.max_model_len, parts.eos_token_ids, self.vocab_size, parts.side_inputs)
        self._rules = RequestRules.of(config, *rules)
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
    def is_broken(self) -> bool:
        """Whether something broke off, and the engine could not be reset. Only another reset can help."""
        return self._is_broken

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. While the engine is paused, requests may wait without such work."""
        return bool(self._early) or any(replica.has_work for replica in self.replicas)

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
        room = PromptRoom.of(params, is_pooled=options.get("pooling") is not None)
        read = self._reader.read(prompt, add_special_tokens=add_special_tokens, room=room)
        request = GenerationRequest(request_id, read, params, **options)
        self._rules.check(request)
        self._bad_words(request)
        self.check_fits(request)
        self._grammar(request)
        self._adapter(request)
        return request

    def load_adapter(self, request: LoRARequest) -> None:
        """Reads an adapter into host memory, unless it is there. Raises ValueError for a wrong one, as `check` does."""
        if self._loras is None:
            raise ValueError("adapters need an engine that has room for them: set enable_lora")
        self._loras.get(request)

    def unload_adapter(self, number: int) -> None:
        """Forgets an adapter in host memory, if it is there. Requests that have it go on."""
        if self._loras is not None:
            self._loras.forget(number)

    def _adapter(self, request: GenerationRequest) -> LoraAdapter | None:
        """Returns the adapter of a request that was checked, if it has one. Raises ValueError for a wrong one."""
        if request.lora_request is None or self._loras is None:
            return None
        return self._loras.get(request.lora_request)

    def prepare(self, request: GenerationRequest) -> Future[CompiledGrammar] | None:
        """Returns the grammar of a request as soon as it is compiled, or the ValueError in it. None if it has none.

        `submit` waits for it. A caller that must not wait calls this first, and submits the request with it when it is
        done.
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
        num_side_rows = sum(map(len, request.prompt.side_inputs))
        self.replicas[0].scheduler.check_fits(num_prompt_tokens, self._rules.limit(request), num_beams, num_side_rows)

    def _grammar(
        self, request: GenerationRequest, prepared: Future[CompiledGrammar] | None = None
    ) -> CompiledGrammar | None:
        """Waits for the grammar of `request`, if it has one. Raises ValueError for a wrong one.

        Raises OverloadedError for one that has no room now. `prepared` is what `prepare` has returned, if it was asked.
        """
        future = prepared or self.prepare(request)
        if future is None or self._constraints is None:
            return None
        try:
            grammar = future.result()
        except ParameterError as error:  # others raise the same instance, and callers add to its text
            raise ParameterError(str(error), error.param) from error
        self._constraints.check(request.params, grammar)
        return grammar

    def submit(self, request: GenerationRequest, prepared: Future[CompiledGrammar] | None = None) -> None:
        """Queues a checked request, once its grammar is compiled, if it has one. If it raises, nothing is queued.

        `prepared` is what `prepare` returned.

        Raises ValueError when its id is in use or its grammar is wrong, OverloadedError when there is no room for its
        grammar, and RuntimeError after `close`.
        """
        self._ready()
        grammar = self._grammar(request, prepared)
        sequences = request.sequences()
        self._check_free([request.request_id, *(sequence.request_id for sequence in sequences)])
        warnings = () if grammar is None else grammar.warnings
        bad_words, adapter = self._bad_words(request), self._adapter(request)
        queued = [self._queued(sequence, grammar, bad_words, adapter) for sequence in sequences]
        self.outputs.add(request, [sequence.request_id for sequence in sequences], time.monotonic(), warnings)
        try:
            self._queue(request, queued, self._router.choose(queued[0]))
        except BaseException:
            self.abort(request.request_id)
            raise
        self._num_prompt_tokens += len(request.prompt.token_ids)

    @staticmethod
    def _queue(request: GenerationRequest, queued: Sequence[Request], scheduler: Scheduler) -> None:
        """Gives all sequences of a request to one scheduler, so that they share the prompt's pages."""
        for one in queued:
            scheduler.add(one, watched=is_watched(request))

    def step(self) -> list[RequestOutput]:
        """Dispatches each replica's next step, reads the step before it, and returns the outputs for callers.

        Replicas do not wait for each other: when several compute, only those that are done are read. Replicas
        that share experts step together.

        If an exception breaks the step off, Ctrl-C included, all requests of all replicas and the prefix caches are
        dropped: host and device may have stopped at different points, and the cache must never hold a page that was
        not computed. Raises RuntimeError after `close`.
        """
        self._ready()
        early, self._early = self._early, []
        with self._reset_if_it_breaks_off():
            return [*early, *self._step()]

    @contextmanager
    def _reset_if_it_breaks_off(self) -> Iterator[None]:
        """Drops all requests and the prefix caches if an exception breaks off what may leave them half changed."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            try:
                self._reset()
            except Exception:  # the error that broke it off is raised; `_ready` tries again and raises this one
                logger.exception("the engine could not be reset")
            raise

    def _step(self) -> list[RequestOutput]:
        if self._rounds is not None:
            self._rounds.dispatch(self.outputs)
        else:
            for replica in self.replicas:
                replica.dispatch(self.outputs)
        if not any(replica.is_busy for replica in self.replicas) and any(r.waits_for_pages for r in self.replicas):
            time.sleep(POLL_SECONDS)
        if self._rounds is not None:
            results = self._rounds.collect(self.outputs)
        else:
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
        """Ends a request now, frees its pages and returns its last output; None if it is unknown or has ended.

        The last output of a request that a pause has ended is returned here, and no longer by the next `step`.
        An exception drops all requests, as one in a step does.
        """
        if request_id not in self.outputs:
            for index, early in enumerate(self._early):
                if early.request_id == request_id and early.finished:
                    return self._early.pop(index)
            return None
        with self._reset_if_it_breaks_off():
            ended = [
                replica.scheduler.finish(child_id)
                for child_id in self.outputs.children(request_id)
                for replica in self.replicas  # only one of them has it
            ]
            for replica in self.replicas:
                replica.publish()
            return self.outputs.abort(request_id, [child for child in ended if child is not None])

    def export_request(self, request_id: str) -> ExportedRequest:
        """Ends a request here, and returns what another engine needs to go on with the same tokens.

        Its outputs so far are not told again. Raises ValueError for an id that is unknown or has ended, and
        NotImplementedError for an engine of several processes.
        """
        self._ready()
        form = self._moving_format()
        # It may have to wait for the name, or fail: nothing has ended yet.
        model = self.weight_version.mark(form.fingerprint)
        if request_id not in self.outputs:
            raise ParameterError(f"request {request_id!r} is unknown or has ended: nothing is left of it", "request_id")
        request = self.outputs.request(request_id)
        if request.lora_request is not None:
            raise NotImplementedError("requests with an adapter cannot move to another engine yet")
        open_ids = self.outputs.children(request_id)
        [replica] = [one for one in self.replicas if open_ids[0] in one.scheduler]
        left = {name: replica.scheduler.finish(name) for name in open_ids}
        replica.publish()
        sequences, requests = dict[int, SamplingState](), list[Request]()
        for index, sequence in enumerate(request.sequences()):
            one = left.get(sequence.request_id)
            if one is not None:
                sequences[index] = SamplingState.of(one)
                requests.append(one)
        cargo = load_cargo(replica, form, requests)
        return ExportedRequest(request, self.outputs.take_out(request_id), sequences, model, cargo)

    def import_request(self, exported: ExportedRequest) -> str:
        """Queues a request that another engine has exported, and returns its id.

        The engine must have the same weights and dtypes; meshes, page pools, chunks and steps may differ.
        Raises ValueError for a request that this engine cannot go on with, or whose id is in use.
        """
        self._ready()
        if self.sleeping:
            raise ValueError("an engine that sleeps has no pages for a request that moves to it: call wake_up first")
        form = self._moving_format()
        if exported.model != self.weight_version.mark(form.fingerprint):
            raise ValueError(
                "the request was exported by an engine with another model, dtype, page or version of the weights: use "
                "one like it"
            )
        request = exported.request
        self._rules.check(request)
        self.check_fits(request)
        grammar, sequences = self._grammar(request), request.sequences()
        self._check_free([request.request_id, *(sequence.request_id for sequence in sequences)])
        exported.check(len(sequences), self.vocab_size, self._rules.limit(request))
        bad_words = self._bad_words(request)
        queued = [
            self._queued(sequences[index], grammar, bad_words, None, state)
            for index, state in exported.sequences.items()
        ]
        scheduler = self._router.choose(queued[0])
        [replica] = [one for one in self.replicas if one.scheduler is scheduler]
        for one in queued:
            unload_cargo(replica, form, one, exported.pages)
        warnings = () if grammar is None else grammar.warnings
        try:
            self.outputs.put_back(request, [one.request_id for one in sequences], exported.progress, warnings)
            self._queue(request, queued, scheduler)
        except BaseException:
            self.abort(request.request_id)
            raise
        return request.request_id

    def _moving_format(self) -> PageFormat:
        """Returns how pages travel with requests. Raises NotImplementedError for pages of weights without a name."""
        if self.config.enable_return_routed_experts:
            raise NotImplementedError("the experts of tokens do not move with a request: leave the option out")
        if not self.weight_version.is_shared:
            raise NotImplementedError(
                "requests of an engine whose weights were replaced cannot move to another one: update with a version, "
                "which says for both engines which weights they have"
            )
        return self._page_format()

    def startup(self) -> StartupReport:
        """Returns where the time of the start went."""
        return self._startup.report()

    def stats(self) -> EngineStats:
        """Returns counters and gauges that say how busy the engine is."""
        schedulers = [replica.scheduler for replica in self.replicas]
        traffics = [replica.traffic for replica in self.replicas if replica.traffic is not None]
        drafted = np.sum([replica.num_drafted for replica in self.replicas], axis=0)
        accepted = np.sum([replica.num_accepted for replica in self.replicas], axis=0)
        return EngineStats(
            num_steps=sum(replica.num_steps for replica in self.replicas),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=sum(replica.num_output_tokens for replica in self.replicas),
            num_preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
            num_prefix_queries=sum(replica.num_prefix_queries for replica in self.replicas),
            num_prefix_hits=sum(replica.num_prefix_hits for replica in self.replicas),
            num_external_queries=sum(s.num_asked_pages * s.cache.page_size for s in schedulers),
            num_external_hits=sum(s.num_loaded_pages * s.cache.page_size for s in schedulers),
            num_failed_loads=sum(traffic.num_failed_loads for traffic in traffics),
            num_saved_pages=sum(traffic.num_saved_pages for traffic in traffics),
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
            num_pages=sum(scheduler.cache.num_pages for scheduler in schedulers),
            num_pages_owned=sum(scheduler.cache.num_owned for scheduler in schedulers),
            num_programs=sum(holder.programs.num_compiled for holder in self.holders),
            num_bucket_tokens=sum(replica.num_bucket_tokens for replica in self.replicas),
            num_padding_tokens=sum(replica.num_padding_tokens for replica in self.replicas),
            num_ended_tokens=sum(replica.num_ended_tokens for replica in self.replicas),
            num_bucket_rows=sum(replica.num_bucket_rows for replica in self.replicas),
            num_padding_rows=sum(replica.num_padding_rows for replica in self.replicas),
            num_verifications=int(drafted[:1].sum()),
            num_draft_tokens=int(drafted.sum()),
            num_accepted_tokens=int(accepted.sum()),
            num_accepted_per_pos=tuple(accepted.tolist()),
            num_expert_placements=sum(balancer.num_placements for balancer in self._balancers),
            mean_expert_load=round(sum(balancer.mean_load for balancer in self._balancers)),
            most_expert_load=round(sum(balancer.most_load for balancer in self._balancers)),
            **({} if self._loras is None else self._adapter_stats()),
        )

    def _adapter_stats(self) -> dict[str, Any]:
        schedulers = [replica.scheduler for replica in self.replicas]
        return {
            "max_loras": self.config.max_loras,
            "running_adapters": _names(one for scheduler in schedulers for one in scheduler.lora_slots.held.values()),
            "waiting_adapters": _names(one.adapter for scheduler in schedulers for one in scheduler.queue),
        }

    def expert_loads(self) -> dict[int, NDArray[np.int64]]:
        """Returns how many tokens have chosen each expert since the start, i64[experts], by the number of the layer.

        It waits for the steps that were dispatched, and tokens that were computed for nothing count too. Raises
        ValueError for an engine that does not count them.
        """
        if not self._meters:
            raise ValueError("nobody counts which experts are chosen: set count_expert_loads or enable_eplb")
        self._ready()
        if "kv_cache" not in self.sleeping:  # which has taken the loads with it
            for meter in self._meters:
                meter.take()
        for meter in self._meters:
            meter.read()
        total = np.sum([meter.total for meter in self._meters], axis=0)
        return {layer: total[layer, :count] for layer, count in self._num_experts.items()}

    def take_reports(self) -> list[StepReport]:
        """Returns reports of the steps read since the last call: at most the `MAX_REPORTS` latest of each replica."""
        return [report for replica in self.replicas for report in replica.take_reports()]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets every cached prefix, and returns True, as vLLM does. The arguments are vLLM's, too.

        Running requests keep their pages, or with `reset_running_requests` compute all their tokens again.
        With `reset_connector`, what a connector keeps outside of the pool is forgotten as well.
        """
        for replica in self.replicas:
            if reset_running_requests:
                replica.scheduler.preempt_all()
            replica.forget_prefixes(elsewhere=reset_connector)
        if reset_connector and self._connector is not None:
            self._connector.reset()
        return True

    @property
    def weights(self) -> Params:
        """The parameters of the first replica as they are on its devices: nested dicts and lists of arrays.

        Raises ValueError while they sleep.
        """
        if "weights" in self.sleeping:
            raise ValueError("the weights sleep, and are not on the devices: call wake_up first")
        return {name: value for name, value in self.holders[0].params.items() if name != LORA}

    def update_weights(
        self, source: WeightSource, version: str | None = None, kv: KVChange = "drop", partial: bool = False
    ) -> str:
        """Replaces the weights between two steps, and returns the name of the new ones.

        Nothing is compiled, but for stacks of layers that a part changes. Either all are replaced or none: after an
        error the engine goes on with those before, and so do requests that run. Steps that were dispatched compute with
        those before. The whole model must fit a second time, unless it is a tree whose arrays are in place.

        source: a tree like `Engine.weights`, whose arrays are used as they are where they are in place, something
            that `HoldsWeights`, arrays by their names in a checkpoint, which come into the forms that the engine
            has, or the directory of a checkpoint of this model. Where several processes have devices of the engine,
            only a directory, which each of them reads
        version: what outputs and other engines call them. Pages of keys and values are exchanged only between engines
            whose weights have the same version. None stands for the number of the update, and then with nobody
        kv: with `drop`, requests that run compute all their tokens again. With `keep` they go on with the keys and
            values that they have, which no other request gets. Either way cached prefixes are forgotten
        partial: arrays that are not given stay as they are

        With `enable_eplb` the arrays of experts in a tree are gone as soon as experts move. Drafts stay, but where a
        tree has some.
        Raises ValueError for weights that are missing, unexpected, or of another shape or dtype, and
        NotImplementedError for what this engine cannot do.
        """
        self._ready()
        new_version = self.weight_version.after(version)
        check_kv_change(kv)
        if partial and "weights" in self.sleeping:
            raise ValueError("a part needs the weights beside it, and they sleep: call wake_up first, or give all")
        if kv == "keep" and any(KV_SCALES in layer.declare() for layer in self.spec.layers):
            raise NotImplementedError("keys and values have scales among the weights here, so they go with these: drop")
        if self.config.has_others:
            if not isinstance(source, Path) or partial:
                raise NotImplementedError(
                    "weights on devices of several processes are replaced by those of a directory, which each of them "
                    "reads: write a checkpoint where all hosts find it"
                )
            for holder in self.holders:
                holder.read_params(source)
            new = []  # each process has taken its own
        else:
            new = new_weights(source, [holder.params for holder in self.holders], self._read_weights, partial)
        with self._reset_if_it_breaks_off():
            for holder, params in zip(self.holders, new, strict=False):
                holder.replace_params(params)
            self.weight_version = new_version
            for balancer in self._balancers:
                balancer.place_all()
            for replica in self.replicas:
                replica.begin_version(new_version, keeps_pages=kv == "keep")
            if self._connector is not None:  # and no page of the weights before is on its way
                self._connector.version = new_version
        return new_version.name

    # Pauses, and memory that is given back.

    @property
    def is_paused(self) -> bool:
        """Whether requests that come now wait until `resume`."""
        return self._sleep.is_paused

    @property
    def is_settled(self) -> bool:
        """Whether the engine is paused, no step is under way, and everything about steps so far has been told."""
        return self.is_paused and not self.has_work

    @property
    def sleeping(self) -> tuple[SleepTag, ...]:
        """The tags of what is not on the devices: `weights`, `kv_cache`, or both."""
        return self._sleep.sleeping

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stops computing requests until `resume`; what comes meanwhile waits. Steps that were dispatched end.

        abort: all requests end now, with the tokens that they have; the next `step` returns their outputs.
        wait: requests that have begun are computed to their ends.
        keep: all requests stay where they are, with their pages, and go on after `resume`.
        A caller calls `step` while `has_work`, or `settle`; then the pause is complete. A second one replaces it.
        Raises ValueError for `wait` while weights or pages are not on the devices, because nothing can be computed.
        """
        self._ready()
        state = PauseState.of(mode)
        if mode == "wait" and self.sleeping:
            raise ValueError(
                f"the engine sleeps without its {' and its '.join(self.sleeping)}, so no request can end by itself: "
                "call wake_up first, or pause with mode keep or abort"
            )
        if mode == "abort":
            self._early += filter(None, map(self.abort, self.outputs.request_ids))
        self._sleep.pause(state)

    def settle(self) -> None:
        """Takes the steps after which a pause is complete. The next `step` returns the outputs of all of them.

        An exception drops all requests, as one in a step does.
        """
        with self._reset_if_it_breaks_off():
            while self.is_paused and any(replica.has_work for replica in self.replicas):
                self._early += self._step()

    def resume(self) -> None:
        """Computes requests again. Raises ValueError while weights or pages are not on the devices."""
        self._ready()
        self._sleep.resume()

    def release_kv(self) -> None:
        """Frees the memory of KV pages until `wake_up`. Cached prefixes are forgotten, and so is the KV of requests.

        Requests that a pause has kept compute all their tokens again afterwards. Raises ValueError unless the engine is
        paused and settled, and NotImplementedError where KV pages go elsewhere, too.
        """
        self.check_sleep()
        self._check_rest()
        self.reset_prefix_cache(reset_running_requests=True)
        self._sleep.release_kv()

    def sleep(self, level: int = 1) -> None:
        """Gives back memory of the devices until `wake_up`. The levels are vLLM's; the engine must be settled.

        0: none. 1: that of KV pages, as `release_kv` does, and that of weights, which go to the host's memory; on CPUs
        they are there already and stay. 2: both, and the weights are dropped: `update_weights` must bring others, and
        arrays that a caller holds stay.
        Raises ValueError unless the engine is paused and settled, and NotImplementedError as `release_kv` does, and
        for level 2 where weights cannot be replaced.
        """
        self.check_sleep(level)
        self._check_rest()
        if level:
            self.release_kv()
            self._sleep.release_weights(level)

    def check_sleep(self, level: int = 1) -> None:
        """Checks a level of `sleep` before a pause for it. Raises the same errors for it as `sleep` does."""
        self._ready()
        if level not in SLEEP_LEVELS:
            raise ValueError(f"the level of sleep must be 0, 1 or 2, not {level!r}")
        if level == 2 and self.config.has_others:
            raise NotImplementedError(
                "sleep(level=2) drops the weights of one process, and this engine has several: use level 1"
            )
        if level and self._connector is not None:
            raise NotImplementedError(
                "the pages of an engine with a kv_transfer_config may be on their way elsewhere, and stay: sleep at "
                "level 0, or leave kv_transfer_config out"
            )

    def wake_up(self, tags: Iterable[SleepTag] | None = None) -> bool:
        """Brings back what `tags` name of `weights` and `kv_cache`, or both (None). Returns whether nothing sleeps.

        Nothing is compiled. Weights that were dropped are brought by `update_weights` alone. The engine stays paused.
        """
        self._ready()
        return self._sleep.wake_up(tags)

    def _check_rest(self) -> None:
        self._ready()
        if not self.is_paused or any(replica.has_work for replica in self.replicas):
            raise ValueError(
                "only an engine that is paused, and has ended its steps, gives memory back: pause it first"
            )

    def use_pause(self) -> None:
        """Begins what would hold up the steps of requests: a large vocabulary is built for structured outputs.

        A caller calls it once, while no request runs. Without it the first request with a form has to wait for that.
        """
        if self._constraints is not None:
            self._constraints.warm_up()

    def wait_until_compiled(self) -> None:
        """Waits until every bucket of every replica is compiled. Nothing compiles afterwards."""
        for holder in self.holders:
            holder.programs.wait()

    def close(self) -> None:
        """Stops background work and frees the device's memory. The engine takes no request afterwards."""
        self._is_closed = True
        if self._constraints is not None:
            self._constraints.close()
        for replica in self.replicas:
            if replica.traffic is not None:
                replica.traffic.close()
        if self._connector is not None:
            self._connector.close()
        # They close at the same time because each waits for the bucket that it is compiling.
        with ThreadPoolExecutor(len(self.holders)) as threads:
            list(threads.map(Runner.close, self.holders))
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
        for meter in self._meters:
            meter.drop()
        for balancer in self._balancers:
            balancer.drop()
        if self._rounds is not None:
            self._rounds.drop()
        self.outputs = self._make_outputs()
        self._early.clear()
        self._router = self._make_router()
        for holder in self.holders:
            holder.empty_adapters()  # no request has one any more
            if holder.has_pages:
                holder.reset()
        self._is_broken = False

    def _make_outputs(self) -> OutputProcessor:
        return OutputProcessor(self.tokenizer, self.config.max_outputs_per_second)

    def _make_router(self) -> Router:
        return Router((replica.scheduler for replica in self.replicas), self.config.routing_policy)

    def _check_free(self, names: Iterable[str]) -> None:
        for name in names:
            if self.outputs.is_known(name):
                raise ParameterError(f"request id {name!r} is in use: choose another", "request_id")

    def _bad_words(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of the words that the request forbids. Raises ValueError for wrong ones."""
        return read_bad_words(request.params.bad_words, self.tokenizer, self.vocab_size)

    def _queued(
        self,
        sequence: GenerationRequest,
        grammar: CompiledGrammar | None,
        bad_words: tuple[tuple[int, ...], ...],
        adapter: LoraAdapter | None = None,
        state: SamplingState | None = None,
    ) -> Request:
        """Returns a sequence's request for the scheduler. Seed and place in the queue do not depend on the routing.

        All sequences of a caller's request share `grammar`, `bad_words` and `adapter`. `state`: where this one goes on.
        """
        given = sequence.prompt.cache_salt
        salt = salt_without_adapter(given) if adapter is None else adapter.salt(given)
        sequence = replace(sequence, prompt=replace(sequence.prompt, cache_salt=salt))
        seed, limit = sequence.params.seed, self._rules.limit(sequence)
        num_prompt_tokens = len(sequence.prompt.token_ids)
        detection, beams = sequence.params.repetition_detection, sequence.beam_search
        constraint = None if self._constraints is None else self._constraints.constraint(sequence, grammar)
        request = Request(
            asked=sequence,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            stop_token_ids=self._rules.stop_token_ids(sequence.params),
            limit=limit,
            key=QueueKey(sequence.priority, next(self._arrivals)),
            eos_token_ids=self._rules.eos_token_ids,
            masks_commute=self._masks_commute,
            constraint=None if constraint is None else GuardedConstraint(constraint),
            bad_word_ids=bad_words,
            repetition=None if detection is None else RepetitionDetector(detection, limit - num_prompt_tokens),
            adapter=adapter,
            search=None if beams is None else BeamSearch(beams, num_prompt_tokens, limit, self.eos_token_ids),
            tells_experts=self.config.enable_return_routed_experts and beams is None and sequence.pooling is None,
        )
        if state is not None:
            state.restore(request)
        begin_version(request.weight_starts, len(request.output_token_ids), self.weight_version.name)
        if sequence.wants_explanation:
            cache = self.replicas[0].scheduler.cache
            num_imported = len(request.output_token_ids) - request.num_unreported
            request.trail = Trail(cache.page_size, len(cache.groups), self.vocab_size, num_imported)
        return request


def _names(adapters: Iterable[LoraAdapter | None]) -> tuple[str, ...]:
    """Returns the names of adapters, each once."""
    return tuple(sorted({adapter.name for adapter in adapters if adapter is not None}))
