"""The rules of an engine for its requests, prompts aside. Each process that checks requests for it knows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.lora import LoRARequest
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import MAX_LOGPROBS, LogprobsMode, SamplingParams
from jaxvllm.core.side_input import SideInputRules
from jaxvllm.core.slots import MAX_STOP_IDS
from jaxvllm.core.value_checks import shown
from jaxvllm.kv_transfer.tickets import NAME as TRANSFER
from jaxvllm.kv_transfer.tickets import Ticket, wants_remote_decode, wants_remote_prefill


@dataclass(frozen=True)
class RequestRules:
    """The rules of one engine: which requests it takes, which tokens end them, and how long they may become."""

    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    takes_priorities: bool
    max_logprobs: int = MAX_LOGPROBS  # of each token; -1: all
    has_reasoning: bool = False  # and knows its marks
    logprobs_mode: LogprobsMode = "raw_logprobs"
    has_peers: bool = False  # engines to which prompts may be handed over
    side_inputs: SideInputRules | None = None  # None: a prompt may have none
    has_lora: bool = False  # whether there is room for adapters

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        side_inputs: SideInputRules | None = None,
    ) -> Self:
        """Returns the rules of an engine built from `config`. The other arguments come from its model."""
        return cls(
            max_model_len,
            eos_token_ids,
            vocab_size,
            takes_priorities=config.scheduling_policy == "priority",
            max_logprobs=config.max_logprobs,
            has_reasoning=config.reasoning_parser is not None,
            logprobs_mode=config.logprobs_mode,
            has_peers=config.kv_transfer is not None and config.kv_transfer.kv_connector == "peer",
            side_inputs=side_inputs,
            has_lora=config.enable_lora,
        )

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError with the rule that the request breaks, if any. Its prompt was checked when it was read."""
        self.check_logprobs("logprobs", request.params.logprobs)
        self.check_logprobs("prompt_logprobs", request.params.prompt_logprobs)
        if request.params.thinking_token_budget is not None and not self.has_reasoning:
            raise ParameterError(
                "thinking_token_budget needs an engine that knows the marks of the reasoning: leave it out, or start "
                "with --reasoning-parser",
                "thinking_token_budget",
            )
        self._check_token_ids(request.params)
        if request.beam_search is not None:
            self._check_beams(request)
        self._check_transfer(request)
        if request.prompt.side_inputs:
            self._check_side_inputs(request)
        for name in ("session_id", "answer_id"):
            if not isinstance(value := getattr(request, name), str | None):
                raise ParameterError(f"{name} must be a string, not {value!r}", name)
        self._check_adapter(request)
        priority = request.priority
        if type(priority) is not int:
            raise ParameterError(f"priority must be an integer, not {priority!r}", "priority")
        if priority and not self.takes_priorities:
            raise ParameterError(f"priority {priority} needs an engine with scheduling_policy='priority'", "priority")
        if len({*self.eos_token_ids, *request.params.stop_token_ids}) > MAX_STOP_IDS:
            raise ParameterError(
                f"EOS and stop_token_ids are more than {MAX_STOP_IDS} tokens together: give fewer", "stop_token_ids"
            )

    def _check_adapter(self, request: GenerationRequest) -> None:
        if request.lora_request is None:
            return
        if not isinstance(request.lora_request, LoRARequest):
            raise ParameterError(
                f"lora_request must be a LoRARequest, not {type(request.lora_request).__name__}", "lora_request"
            )
        if not self.has_lora:
            raise ParameterError("lora_request needs an engine that has room for it: set enable_lora", "lora_request")

    def _check_side_inputs(self, request: GenerationRequest) -> None:
        if self.side_inputs is None:
            raise ParameterError(
                "prompt_embeds needs an engine that has room for it: start with enable_prompt_embeds "
                "(--enable-prompt-embeds), or give the prompt as text or token ids",
                "prompt_embeds",
            )
        for side in request.prompt.side_inputs:
            self.side_inputs.check(side)
        for name, is_asked in (
            ("prompt_logprobs", request.params.prompt_logprobs is not None),
            ("use_beam_search", request.beam_search is not None),
            ("explain", request.wants_explanation),
            (TRANSFER, wants_remote_decode(request.kv_transfer_params)),
            (TRANSFER, wants_remote_prefill(request.kv_transfer_params)),
        ):
            if is_asked:
                raise ParameterError(
                    f"{name} is for prompts of tokens, and prompt_embeds has none: leave one of them out", name
                )

    def _check_transfer(self, request: GenerationRequest) -> None:
        params = request.kv_transfer_params
        if params is not None and not isinstance(params, Mapping):
            raise ParameterError(f"{TRANSFER} must be an object, not {shown(params)}", TRANSFER)
        if not wants_remote_decode(params) and not wants_remote_prefill(params):
            return
        if not self.has_peers:
            raise ParameterError(
                f"{TRANSFER} needs an engine whose kv_transfer_config has the kv_connector peer: leave it out", TRANSFER
            )
        if request.params.num_sequences > 1 or request.beam_search is not None:
            raise ParameterError(f"{TRANSFER} is for requests with n=1: leave one of them out", TRANSFER)
        if params is not None and wants_remote_prefill(params):
            Ticket.read(params).check_prompt(request.prompt.token_ids, request.prompt.cache_salt)

    def _check_beams(self, request: GenerationRequest) -> None:
        if request.wants_explanation:
            raise ParameterError("a beam search cannot be explained: leave explain or the search out", "explain")
        if self.logprobs_mode != "raw_logprobs":
            raise ParameterError(
                f"a beam search needs logprobs_mode raw_logprobs, and this engine has {self.logprobs_mode}: leave "
                "use_beam_search out, or start another engine",
                "use_beam_search",
            )

    def check_logprobs(self, name: str, asked: int | None) -> None:
        """Raises ValueError for more log-probabilities of a token than the engine reports."""
        limit = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        if asked is not None and (self.vocab_size if asked == -1 else asked) > limit:
            raise ParameterError(
                f"{name} must be an integer from 0 to {limit}, not {asked}: ask for fewer, or start the engine with a "
                "larger max_logprobs",
                name,
            )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, token_ids in (
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logprob_token_ids", params.logprob_token_ids or ()),
        ):
            if token_ids and max(token_ids) >= self.vocab_size:
                raise ParameterError(
                    f"{name}: token id {max(token_ids)} is outside the vocabulary of {self.vocab_size} tokens", name
                )

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Returns the tokens that end a completion: the caller's, and EOS unless the caller ignores it."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))

    def limit(self, request: GenerationRequest) -> int:
        """Returns the largest number of tokens, prompt included, that each sequence of the request may reach."""
        num_prompt_tokens, params = len(request.prompt.token_ids), request.params
        if request.is_prompt_only:
            return num_prompt_tokens + 1  # the step that ends a prompt also samples a token; no caller gets to see it
        if params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, num_prompt_tokens + params.max_tokens)
