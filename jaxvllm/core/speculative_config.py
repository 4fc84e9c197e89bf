"""The options of speculative decoding, by vLLM's names."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from jaxvllm.core.value_checks import check_members, json_members, number

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"]
MAX_DRAFTS = 15  # of a row in a step
_OF_MODELS = ("draft_model", "eagle", "eagle3", "medusa")  # which need a model
# Fields of vLLM that are no choice here: the values that change nothing, and what to tell who gives another.
_ELSEWHERE = "it is what it is for the model itself"
_NO_CHOICE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((None, 1), "each device computes the whole draft"),
    "tensor_parallel_size": ((None,), "each device computes the whole draft"),
    "max_model_len": ((None,), "there are drafts up to max_model_len of the model"),
    "quantization": ((None,), "quantized checkpoints are recognized by their config.json"),
    "revision": ((None,), "give the directory of that revision as the model"),
    "code_revision": ((None,), "nothing in a checkpoint is ever executed"),
    "draft_load_config": ((None,), "drafts are read from safetensors"),
    "enforce_eager": ((None, False, True), "every step is a compiled program"),
    "kv_cache_dtype": ((None,), _ELSEWHERE),
    "disable_by_batch_size": ((None,), "drafts stop by themselves where steps without them are measured to be quicker"),
    "num_speculative_tokens_per_batch_size": ((None,), "whether there are drafts is measured for each number of rows"),
    "enable_adaptive_verification": ((None, False), "whether there are drafts is measured for each number of rows"),
    "rejection_sample_method": ((None, "standard"), "drafts are accepted where they are what is sampled without them"),
    "draft_sample_method": ((None, "greedy", "probabilistic"), "drafts are drawn with the noise of the model"),
    "synthetic_acceptance_rates": ((None,), "drafts are accepted where they are what is sampled without them"),
    "synthetic_acceptance_length": ((None,), "drafts are accepted where they are what is sampled without them"),
    "parallel_drafting": ((None, False), "a head runs once for each draft"),
    "use_heterogeneous_vocab": ((None, False), "a draft model must have the tokenizer of the model"),
    "use_local_argmax_reduction": ((None, False), "there is one way of choosing a draft"),
    "disable_padded_drafter_batch": ((None, False), "all steps have fixed shapes"),
    "disable_eagle_block_drop": ((None, False), "cached pages stay whole"),
    "index_share_for_mtp_iteration": ((None,), "no sparse attention is supported"),
    "dspark_draft_topk": ((None,), "method dspark is not supported"),
    "suffix_decoding_max_cached_requests": ((None, 10000), "there is one for each of max_num_seqs"),
    "suffix_decoding_min_token_prob": ((None, 0.1), "what followed the same tokens last is guessed, without counting"),
}
# Fields of vLLM that choose kernels, which change nothing.
_KERNELS = ("moe_backend", "attention_backend")

_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")


@dataclass(frozen=True)
class SpeculativeConfig:
    """The proposer that guesses, and how many tokens at once. Raises ValueError for values that are out of range."""

    method: Method | None = None  # None: the config.json of `model` tells
    model: str | None = None  # the draft: a directory, or a name on the hub; mtp: the model itself has it
    num_speculative_tokens: int = 3  # of a row in a step
    prompt_lookup_min: int = 2  # ngram: tokens that must be the same before what is guessed
    prompt_lookup_max: int = 5  # ngram: the most that are compared
    suffix_decoding_max_tree_depth: int = 24  # suffix: the most tokens that are compared before what is guessed
    suffix_decoding_max_spec_factor: float = 1.0  # suffix: guesses for each token that is the same

    def __post_init__(self) -> None:
        if self.method is None and self.model is None:
            raise ValueError("needs a method, or a model that tells it")
        if self.method is not None and self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r}")
        if self.method is not None and (self.model is not None) != (self.method in _OF_MODELS):
            rule = "needs a model" if self.model is None else "has no model"
            raise ValueError(f"method {self.method} {rule}: those with one are {', '.join(_OF_MODELS)}")
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ValueError(f"model must be a directory or a name on the hub, not {self.model!r}")
        for name, most in (
            ("num_speculative_tokens", MAX_DRAFTS),
            ("prompt_lookup_max", 32),
            ("prompt_lookup_min", self.prompt_lookup_max),
            ("suffix_decoding_max_tree_depth", 64),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most}, not {value!r}")
        factor = "suffix_decoding_max_spec_factor"
        object.__setattr__(self, factor, number(factor, getattr(self, factor), 0, 64))

    @classmethod
    def read(cls, value: object) -> Self:
        """Reads a mapping or a JSON object. Raises ValueError for anything else, and for unknown names.

        A field of vLLM that is no choice here may have the values that change nothing. As in vLLM, where only one of
        `prompt_lookup_min` and `prompt_lookup_max` is given, both are that.
        """
        try:
            members = {name: one for name, one in json_members(value).items() if name not in _KERNELS}
            names = [field.name for field in fields(cls)]
            check_members(members, names, _NO_CHOICE)
            given = {name: one for name, one in members.items() if name in names}
            given = {name: one for name, one in given.items() if one is not None or name not in _LOOKUP}
            if len(one := [given[name] for name in _LOOKUP if name in given]) == 1:
                given |= dict.fromkeys(_LOOKUP, one[0])
            return cls(**given)
        except ValueError as error:
            example = '{"method": "ngram", "num_speculative_tokens": 3}'
            raise ValueError(f"speculative_config {error}; an example: {example}") from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))


# Three tokens must come again, not two: nobody asked for these drafts, so there are fewer, and more of them are right.
DEFAULT_SPECULATION = SpeculativeConfig(method="ngram", prompt_lookup_min=3)
