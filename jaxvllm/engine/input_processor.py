"""`InputProcessor`: checks what callers ask of an engine, and makes of it what schedulers take."""

import random
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Unpack

from jaxvllm.config import EngineConfig
from jaxvllm.core.beam import BeamSearch
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.explanation import Trail
from jaxvllm.core.lora import LoraAdapter
from jaxvllm.core.repetition import RepetitionDetector
from jaxvllm.core.request import GenerationRequest, QueueKey, Request, RequestOptions
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.token_constraint import GuardedConstraint
from jaxvllm.core.weight_version import begin_version
from jaxvllm.engine.build import EngineParts
from jaxvllm.engine.engine_adapters import EngineAdapters
from jaxvllm.engine.exported_request import SamplingState
from jaxvllm.engine.replica import Replica
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.grammar.request_constraints import without_tokenizer
from jaxvllm.text.bad_words import read_bad_words
from jaxvllm.text.prompts import PromptLike, PromptReader, PromptRoom

if TYPE_CHECKING:
    from jaxvllm.grammar.constraint import CompiledGrammar


class InputProcessor:
    """Reads prompts, and knows the rules, grammars and adapters of an engine. It queues nothing."""

    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        adapters: EngineAdapters,
        replica: Replica,
        *,
        masks_commute: bool,
    ):
        """Takes one `replica` of the engine, because all are alike.

        `masks_commute`: nobody reads the logits of one position but the sampler, such as a logits processor.
        """
        self._config = config
        self._tokenizer = parts.tokenizer
        self._vocab_size = parts.spec.vocab_size
        self._eos_token_ids = parts.eos_token_ids
        self._adapters = adapters
        self._replica = replica
        self._masks_commute = masks_commute
        self._reader = PromptReader(parts.tokenizer, parts.spec.vocab_size, parts.max_model_len)
        of_model = (parts.max_model_len, parts.eos_token_ids, parts.spec.vocab_size, parts.side_inputs)
        self.rules = RequestRules.of(config, *of_model)
        self.constraints = parts.constraints
        self._arrivals = count()
        self._seeds = random.Random(config.seed)

    def check(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> GenerationRequest:
        """Returns the request that a caller asks for. For arguments and errors see `Engine.check`."""
        room = PromptRoom.of(params, is_pooled=options.get("pooling") is not None)
        read = self._reader.read(prompt, add_special_tokens=add_special_tokens, room=room)
        request = GenerationRequest(request_id, read, params, **options)
        self.rules.check(request)
        self.bad_words(request)
        self.check_fits(request)
        self.grammar(request)
        self._adapters.of(request)
        return request

    def check_fits(self, request: GenerationRequest) -> None:
        """Raises ValueError for a request that could not finish even if it had every page of a replica."""
        num_prompt_tokens = len(request.prompt.token_ids)
        num_beams = None if request.beam_search is None else request.beam_search.beam_width
        num_side_rows = sum(map(len, request.prompt.side_inputs))
        self._replica.scheduler.check_fits(num_prompt_tokens, self.rules.limit(request), num_beams, num_side_rows)

    def prepare(self, request: GenerationRequest) -> "Future[CompiledGrammar] | None":
        """Returns the grammar of a request as soon as it is compiled, or the ValueError in it. None if it has none."""
        params = request.params
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return None
        if self.constraints is None:
            raise without_tokenizer()
        return self.constraints.prepare(params)

    def grammar(
        self, request: GenerationRequest, prepared: "Future[CompiledGrammar] | None" = None
    ) -> "CompiledGrammar | None":
        """Waits for the grammar of `request`, if it has one. Raises ValueError for a wrong one.

        Raises OverloadedError for one that has no room now. `prepared` is what `prepare` has returned, if it was asked.
        """
        future = prepared or self.prepare(request)
        if future is None or self.constraints is None:
            return None
        try:
            grammar = future.result()
        except ParameterError as error:  # others raise the same instance, and callers add to its text
            raise ParameterError(str(error), error.param) from error
        self.constraints.check(request.params, grammar)
        return grammar

    def bad_words(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of the words that the request forbids. Raises ValueError for wrong ones."""
        return read_bad_words(request.params.bad_words, self._tokenizer, self._vocab_size)

    def queued(
        self,
        sequence: GenerationRequest,
        version: str,
        grammar: "CompiledGrammar | None",
        bad_words: tuple[tuple[int, ...], ...],
        adapter: LoraAdapter | None = None,
        state: SamplingState | None = None,
    ) -> Request:
        """Returns a sequence's request for the scheduler. Seed and place in the queue do not depend on the routing.

        `version` is that of the weights that compute it now. All sequences of a caller's request share `grammar`,
        `bad_words` and `adapter`. `state`: where this one goes on.
        """
        sequence = self._adapters.salted(sequence, adapter)
        seed, limit = sequence.params.seed, self.rules.limit(sequence)
        num_prompt_tokens = len(sequence.prompt.token_ids)
        detection, beams = sequence.params.repetition_detection, sequence.beam_search
        constraint = None if self.constraints is None else self.constraints.constraint(sequence, grammar)
        request = Request(
            asked=sequence,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            stop_token_ids=self.rules.stop_token_ids(sequence.params),
            limit=limit,
            key=QueueKey(sequence.priority, next(self._arrivals)),
            eos_token_ids=self.rules.eos_token_ids,
            masks_commute=self._masks_commute,
            constraint=None if constraint is None else GuardedConstraint(constraint),
            bad_word_ids=bad_words,
            repetition=None if detection is None else RepetitionDetector(detection, limit - num_prompt_tokens),
            adapter=adapter,
            search=None if beams is None else BeamSearch(beams, num_prompt_tokens, limit, self._eos_token_ids),
            tells_experts=self._config.enable_return_routed_experts and beams is None and sequence.pooling is None,
        )
        if state is not None:
            state.restore(request)
        begin_version(request.weight_starts, len(request.output_token_ids), version)
        if sequence.wants_explanation:
            cache = self._replica.scheduler.cache
            num_imported = len(request.output_token_ids) - request.num_unreported
            request.trail = Trail(cache.page_size, len(cache.groups), self._vocab_size, num_imported)
        return request
