"""The rules of an engine for its requests, prompts aside. Each process that checks requests for it knows them."""

from dataclasses import dataclass
from typing import Self

from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError, UnsupportedParameterError
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxvllm.core.slots import MAX_STOP_IDS

# Parameters that nothing takes into account yet, with the value that changes nothing.
NOT_YET = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "allowed_token_ids": None,
    "bad_words": (),
    "structured_outputs": None,
    "thinking_token_budget": None,
    "logprob_token_ids": None,
}


@dataclass(frozen=True)
class RequestRules:
    """The rules of one engine: which requests it takes, which tokens end them, and how long they may become."""

    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    takes_priorities: bool

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int, eos_token_ids: tuple[int, ...]) -> Self:
        """Returns the rules of an engine built from `config`. The other two arguments come from its model."""
        return cls(max_model_len, eos_token_ids, takes_priorities=config.scheduling_policy == "priority")

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError with the rule that the request breaks, if any. Its prompt was checked when it was read."""
        for name, neutral in NOT_YET.items():
            if getattr(request.params, name) != neutral:
                raise UnsupportedParameterError(f"{name} is not supported: leave it out", name)
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(request.params, name)) is not None and not 0 <= asked <= MAX_LOGPROBS:
                raise ParameterError(f"{name} must be an integer from 0 to {MAX_LOGPROBS}, not {asked}", name)
        if (beams := request.beam_search) is not None and beams.num_candidates > MAX_LOGPROBS:
            raise ParameterError(
                f"beam_width (n over HTTP) {beams.beam_width} needs the {beams.num_candidates} most likely next tokens "
                f"of each beam, and {MAX_LOGPROBS} are the most: lower it to {MAX_LOGPROBS // 2}",
                "n",
            )
        priority = request.priority
        if type(priority) is not int:
            raise ParameterError(f"priority must be an integer, not {priority!r}", "priority")
        if priority and not self.takes_priorities:
            raise ParameterError(f"priority {priority} needs an engine with scheduling_policy='priority'", "priority")
        if len(self.stop_token_ids(request.params)) > MAX_STOP_IDS:
            raise ParameterError(
                f"EOS and stop_token_ids are more than {MAX_STOP_IDS} tokens together: give fewer", "stop_token_ids"
            )

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Returns the tokens that end a completion: the caller's, and EOS unless the caller ignores it."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))

    def limit(self, request: GenerationRequest) -> int:
        """Returns the largest number of tokens, prompt included, that each sequence of the request may reach."""
        num_prompt_tokens, params = len(request.prompt.token_ids), request.params
        if params.scores_only:
            return num_prompt_tokens + 1  # the step that ends a prompt also samples a token; no caller gets to see it
        if params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, num_prompt_tokens + params.max_tokens)
