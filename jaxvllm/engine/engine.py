"""The engine distributes requests among its replicas and steps them. It is single-threaded and synchronous."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack

import numpy as np
from numpy.typing import NDArray

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.pause import PauseMode, PauseState, SleepTag
from jaxvllm.core.request import GenerationRequest, Request, RequestOptions
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.scheduler import Scheduler
from jaxvllm.core.weight_version import KVChange, WeightVersion
from jaxvllm.engine.burst_pace import OFFLINE_SECONDS
from jaxvllm.engine.decode_pace import DecodePace
from jaxvllm.engine.engine_adapters import EngineAdapters
from jaxvllm.engine.engine_experts import EngineExperts
from jaxvllm.engine.engine_sleep import EngineSleep
from jaxvllm.engine.engine_stats import engine_stats
from jaxvllm.engine.engine_weights import EngineWeights
from jaxvllm.engine.exported_request import ExportedRequest
from jaxvllm.engine.input_processor import InputProcessor
from jaxvllm.engine.live_request import is_watched
from jaxvllm.engine.multihost import lead
from jaxvllm.engine.new_weights import WeightSource
from jaxvllm.engine.output_processor import OutputProcessor
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.replica import DEPTH, DEPTH_IN_TURNS, Replica
from jaxvllm.engine.request_moves import RequestMoves
from jaxvllm.engine.rounds import Rounds
from jaxvllm.engine.router import Router
from jaxvllm.engine.startup import StartupReport
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.engine.turns import POLL_SECONDS, Turns
from jaxvllm.models.params import Params
from jaxvllm.runtime.logits_processors import LogitsProcessor
from jaxvllm.runtime.runner import Runner
from jaxvllm.text.prompts import PromptLike

if TYPE_CHECKING:
    from jaxvllm.engine.kv_event_publisher import KVEventPublisher
    from jaxvllm.grammar.constraint import CompiledGrammar

logger = logging.getLogger(__name__)


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
        self._publishers: tuple[KVEventPublisher, ...] = ()
        if config.kv_events is not None:
            from jaxvllm.engine.kv_event_publisher import open_publishers  # ZeroMQ takes 8 ms

            sizes = config.mesh_shape.data, config.page_size, config.data_parallel_rank
            self._publishers = open_publishers(config.kv_events, *sizes)
        try:
            parts = lead(config, logits_processors)
        except BaseException:
            self._close_publishers()
            raise
        self.config = config
        self.tokenizer = parts.tokenizer
        self.tokenizer_directory = parts.tokenizer_directory
        self.spec = parts.spec
        self.vocab_size = parts.spec.vocab_size
        self.max_model_len = parts.max_model_len
        self.defaults = parts.defaults
        self.pooler = parts.pooler
        self._connector = parts.connector
        self.holders = parts.holders  # of weights, pages and programs
        self._experts = EngineExperts(config, parts.spec, parts.holders)
        nothing = (None,) * len(parts.runners)
        balancers = self._experts.balancers if parts.lockstep is None and self._experts.balancers else nothing
        depth = DEPTH if config.async_scheduling else DEPTH_IN_TURNS
        of_replicas = zip(parts.runners, parts.traffic, self._publishers or nothing, balancers, strict=True)
        paces = [DecodePace(holder, burst_seconds) for holder in parts.holders]
        paces *= len(parts.runners) // len(paces)
        self.replicas = tuple(
            Replica(i, parts.make_scheduler, runner, paces[i], traffic, publisher, depth, balancer)
            for i, (runner, traffic, publisher, balancer) in enumerate(of_replicas)
        )
        self._steps: Turns | Rounds = Turns(self.replicas)
        if parts.lockstep is not None:
            self._steps = Rounds(parts.lockstep, self.replicas, paces[0], depth, self._experts.balancers)
        moves_pages = parts.connector is not None
        self._sleep = EngineSleep(self.replicas, self.holders, self._experts.meters, moves_pages=moves_pages)
        of_engine = (self.replicas, self.holders, self._experts.balancers, parts.connector)
        self._weights = EngineWeights(parts.spec, *of_engine, parts.read_weights, has_others=config.has_others)
        self.adapters = EngineAdapters(config, parts.adapter_reader, self.replicas)
        self._early: list[RequestOutput] = []  # outputs that the next step returns
        self.outputs = self._make_outputs()
        self.inputs = InputProcessor(
            config, parts, self.adapters, self.replicas[0], masks_commute=not logits_processors
        )
        of_requests = (self.inputs, self._weights, self.adapters)
        self._moves = RequestMoves(config, self.replicas, *of_requests, parts.page_format)
        self.eos_token_ids = parts.eos_token_ids
        self.side_inputs = parts.side_inputs
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
        return self.inputs.check(request_id, prompt, params, add_special_tokens=add_special_tokens, **options)

    def submit(self, request: GenerationRequest, prepared: "Future[CompiledGrammar] | None" = None) -> None:
        """Queues a checked request, once its grammar is compiled, if it has one. If it raises, nothing is queued.

        `prepared` is what `InputProcessor.prepare` has returned. A caller that must not wait asks for it first, and
        submits the request when it is done.

        Raises ValueError when its id is in use or its grammar is wrong, OverloadedError when there is no room for its
        grammar, and RuntimeError after `close`.
        """
        self._ready()
        grammar = self.inputs.grammar(request, prepared)
        sequences = request.sequences()
        self._check_free([request.request_id, *(sequence.request_id for sequence in sequences)])
        warnings = () if grammar is None else grammar.warnings
        bad_words, adapter = self.inputs.bad_words(request), self.adapters.of(request)
        name = self.weight_version.name
        queued = [self.inputs.queued(sequence, name, grammar, bad_words, adapter) for sequence in sequences]
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
        self._steps.dispatch(self.outputs)
        if not any(replica.is_busy for replica in self.replicas) and any(r.waits_for_pages for r in self.replicas):
            time.sleep(POLL_SECONDS)
        results = self._steps.collect(self.outputs)
        if not self._startup.is_over and any(replica.num_output_tokens for replica in self.replicas):
            self._startup.first_token()
            logger.info("%s", self.startup())
        return results

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

    def abort_all(self, request_ids: Iterable[str]) -> int:
        """Ends these requests now, and returns how many had not ended. The next `step` returns their last outputs."""
        ended = [output for output in map(self.abort, request_ids) if output is not None]
        self._early += ended
        return len(ended)

    def end(self, request: GenerationRequest) -> None:
        """Ends a checked request that was never queued, as if it had been aborted at once.

        The next `step` returns its output, which has no tokens. Raises ValueError when its id is in use.
        """
        self._ready()
        names = [sequence.request_id for sequence in request.sequences()]
        self._check_free([request.request_id, *names])
        self.outputs.add(request, names, time.monotonic())
        self._early.append(self.outputs.abort(request.request_id, []))

    def export_request(self, request_id: str) -> ExportedRequest:
        """Ends a request here, and returns what another engine needs to go on with the same tokens.

        Its outputs so far are not told again. Raises ValueError for an id that is unknown or has ended, and
        NotImplementedError for an engine of several processes.
        """
        self._ready()
        return self._moves.take_out(request_id, self.outputs)

    def import_request(self, exported: ExportedRequest) -> str:
        """Queues a request that another engine has exported, and returns its id.

        The engine must have the same weights and dtypes; meshes, page pools, chunks and steps may differ. It must have
        the adapter of the request with the same content, or find it in the directory that the request names.
        Raises ValueError for a request that this engine cannot go on with, or whose id is in use.
        """
        self._ready()
        if self.sleeping:
            raise ValueError("an engine that sleeps has no pages for a request that moves to it: call wake_up first")
        queued, warnings = self._moves.read(exported, self._check_free)
        scheduler = self._router.choose(queued[0])
        [replica] = [one for one in self.replicas if one.scheduler is scheduler]
        self._moves.unload(exported, queued, replica)
        request = exported.request
        names = [sequence.request_id for sequence in request.sequences()]
        try:
            self.outputs.put_back(request, names, exported.progress, warnings)
            self._queue(request, queued, scheduler)
        except BaseException:
            self.abort(request.request_id)
            raise
        return request.request_id

    def startup(self) -> StartupReport:
        """Returns where the time of the start went."""
        return self._startup.report()

    def stats(self) -> EngineStats:
        """Returns counters and gauges that say how busy the engine is."""
        balancers, adapters = self._experts.balancers, self.adapters.stats()
        return engine_stats(self.replicas, self.holders, balancers, adapters, self._num_prompt_tokens)

    def expert_loads(self) -> dict[int, NDArray[np.int64]]:
        """Returns how many tokens have chosen each expert since the start, i64[experts], by the number of the layer.

        It waits for the steps that were dispatched, and tokens that were computed for nothing count too. Raises
        ValueError for an engine that does not count them.
        """
        if self._experts.meters:
            self._ready()
        return self._experts.loads(are_counted="kv_cache" not in self.sleeping)  # which has taken them with it

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
        return self._weights.tree

    @property
    def weight_version(self) -> WeightVersion:
        """The version of the weights that the next step has."""
        return self._weights.version

    def update_weights(
        self, source: WeightSource, version: str | None = None, kv: KVChange = "drop", partial: bool = False
    ) -> str:
        """Replaces the weights between two steps, and returns the name of the new ones.

        Nothing is compiled, but for stacks of layers that a part changes. Either all are replaced or none: after an
        error the engine goes on with those before, and so do requests that run. Only where a device has no memory left
        to compute ratios of DoRA or to move experts, the engine goes on with the new ones, and requests are dropped.
        Steps that were dispatched compute with those before. The whole model must fit a second time, unless it is a
        tree whose arrays are in place.

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
        incoming = self._weights.prepare(source, version, kv, partial)
        with self._reset_if_it_breaks_off():
            self._weights.take(incoming)
        return incoming.version.name

    def name_weights(self, name: str) -> None:
        """Gives the weights another name: see `EngineWeights.rename`. Raises ValueError for a wrong one."""
        self._ready()
        self._weights.rename(name)

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
            self.abort_all(self.outputs.request_ids)
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
        """Frees the memory of KV pages until `wake_up`: see `EngineSleep.release_kv`."""
        self._ready()
        self._sleep.release_kv()

    def sleep(self, level: int = 1) -> None:
        """Gives back memory of the devices until `wake_up`. The levels are vLLM's: see `EngineSleep.sleep`."""
        self._ready()
        self._sleep.sleep(level)

    def check_sleep(self, level: int = 1) -> None:
        """Checks a level of `sleep` before a pause for it. Raises the same errors for it as `sleep` does."""
        self._ready()
        self._sleep.check(level)

    def wake_up(self, tags: Iterable[SleepTag] | None = None) -> bool:
        """Brings back what `tags` name of `weights` and `kv_cache`, or both (None). Returns whether nothing sleeps.

        Nothing is compiled. Weights that were dropped are brought by `update_weights` alone. The engine stays paused.
        """
        self._ready()
        return self._sleep.wake_up(tags)

    def use_pause(self) -> None:
        """Begins what would hold up the steps of requests: a large vocabulary is built for structured outputs.

        A caller calls it once, while no request runs. Without it the first request with a form has to wait for that.
        """
        if self.inputs.constraints is not None:
            self.inputs.constraints.warm_up()

    def wait_until_compiled(self) -> None:
        """Waits until every bucket of every replica is compiled. Nothing compiles afterwards."""
        for holder in self.holders:
            holder.programs.wait()

    def close(self) -> None:
        """Stops background work and frees the device's memory. The engine takes no request afterwards."""
        self._is_closed = True
        if self.inputs.constraints is not None:
            self.inputs.constraints.close()
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
        self._experts.drop()
        self._steps.drop()
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
