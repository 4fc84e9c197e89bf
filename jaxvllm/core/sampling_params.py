"""`SamplingParams`: the options of one completion, checked when they are constructed."""

import enum
import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Self

from jaxvllm.core.errors import ParameterError, UnsupportedParameterError

# Below this temperature a request is greedy: dividing the logits by a smaller number overflows float32 long before
# the draw could differ from the argmax.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1e6
# The smallest float32 that devices do not flush to zero. With a top_p of 0 the sampler would exclude every token.
MIN_FLOAT32 = 2.0**-126
MAX_N = 16_384
MAX_STOP_STRINGS = 64  # the text is searched for each of them after every token
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 30  # what the device's table holds, less room for EOS
MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1  # counts and token ids cross to the device as int32
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

# vLLM has these options. This engine would ignore them, so it refuses them.
UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "early_stopping",
        "extra_args",
        "flat_logprobs",
        "frequency_penalty",
        "guided_decoding",
        "length_penalty",
        "logit_bias",
        "logits_processors",
        "logprob_token_ids",
        "presence_penalty",
        "repetition_detection",
        "repetition_penalty",
        "skip_clone",
        "skip_reading_prefix_cache",
        "structured_outputs",
        "thinking_token_budget",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)


class RequestOutputKind(enum.Enum):
    """Says what each output before the last one carries: all the text so far, only the new text, or nothing."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options that say how to draw one request's tokens and when to stop. The names and meanings are vLLM's.

    Every instance is valid: the constructor raises ValueError for a bad value, NotImplementedError for an option of
    vLLM that this engine lacks, and TypeError for an unknown option. `stop` and `stop_token_ids` are stored as tuples;
    a caller may also give a list, None or (as `stop`) one string.

    The device computes in float32. A number closer to zero than float32 can hold means the same as zero itself would:
    such a temperature is greedy, such a top_p keeps only the most probable token, and such a min_p is off.
    """

    n: int = 1  # completions of one prompt
    temperature: float = 1.0  # higher is more random; 0 = greedy, and so is anything below 1e-5
    top_p: float = 1.0  # smallest set of tokens with this much probability, at least one token; 1 = off
    top_k: int = 0  # the k most probable tokens; 0 or -1 = off, kept as 0
    min_p: float = 0.0  # tokens with at least this share of the best one's probability; 0 = off
    seed: int | None = None  # the same seed draws the same tokens; 64 bits; None = the engine draws one, as for -1
    stop: tuple[str, ...] = ()  # texts that end the output
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the output
    ignore_eos: bool = False  # the output does not end where the model ends it
    max_tokens: int | None = 16  # of the output, at most; None = all that fit the model, 0 = only score the prompt
    min_tokens: int = 0  # EOS and stop tokens are not drawn before; stop strings are not looked for
    logprobs: int | None = None  # best tokens to report beside the chosen one; 0 = the chosen one alone
    prompt_logprobs: int | None = None  # best tokens to report beside each of the prompt's; no prefix cache then
    detokenize: bool = True
    skip_special_tokens: bool = True  # texts are without them
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # the text ends with the stop string
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __new__(cls, **options: Any) -> Self:
        for name in UNSUPPORTED.intersection(options):
            raise UnsupportedParameterError(f"SamplingParams.{name} is not supported: leave it out", name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", _integer("n", self.n, 1, MAX_N))
        put(self, "temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        put(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ParameterError("top_p must be above 0 and at most 1, not 0: for greedy set temperature=0", "top_p")
        put(self, "top_p", max(self.top_p, MIN_FLOAT32))
        put(self, "top_k", max(_integer("top_k", self.top_k, -1, MAX_INT32), 0))
        put(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.min_p < MIN_FLOAT32:
            put(self, "min_p", 0.0)
        if self.seed == -1:  # as in vLLM
            put(self, "seed", None)
        elif self.seed is not None:
            put(self, "seed", _integer("seed", self.seed, MIN_SEED, MAX_SEED))
        put(self, "stop", _stop_strings(self.stop))
        put(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                put(self, name, _integer(name, value, 0, MAX_LOGPROBS))
        if self.max_tokens is not None:
            fewest = 1 if self.prompt_logprobs is None else 0
            if self.max_tokens == 0 < fewest:
                raise ParameterError(
                    f"max_tokens must be an integer from 1 to {MAX_INT32}, not 0: 0 only scores the prompt, and needs "
                    "prompt_logprobs",
                    "max_tokens",
                )
            put(self, "max_tokens", _integer("max_tokens", self.max_tokens, fewest, MAX_INT32))
        put(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_INT32))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}: lower it, or raise max_tokens",
                "min_tokens",
            )
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if type(value := getattr(self, name)) is not bool:
                raise ParameterError(f"{name} must be True or False, not {value!r}", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ParameterError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}", "output_kind")
        if self.stop and not self.detokenize:
            raise ParameterError("stop strings need detokenize=True: set it, or use stop_token_ids", "stop")
        if not self.spaces_between_special_tokens and not self.skip_special_tokens:
            raise UnsupportedParameterError(
                "spaces_between_special_tokens=False needs skip_special_tokens=True: leave one of them out",
                "spaces_between_special_tokens",
            )

    @property
    def greedy(self) -> bool:
        """Whether every step takes the most probable token."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def scores_only(self) -> bool:
        """Whether the request only scores its prompt and generates nothing."""
        return self.max_tokens == 0

    def child(self, index: int) -> "SamplingParams":
        """Returns the parameters of completion `index` of `n`: `n` is 1, and each has its own seed if one was given.

        All completions share the prompt, so only the first scores it, unless scores are all there is to compute.
        """
        if self.n == 1 and index == 0:
            return self
        seed = self.seed
        if seed is not None:
            seed = (seed + index - MIN_SEED) % 2**64 + MIN_SEED  # wraps around: any int64 seed has n children
        scores = self.prompt_logprobs if index == 0 or self.scores_only else None
        return replace(self, n=1, seed=seed, prompt_logprobs=scores)


def _integer(param: str, value: object, low: int, high: int, what: str | None = None) -> int:
    """Returns `value` as an int. Errors call it `what`, or by the name of its parameter."""
    rule = f"{what or param} must be an integer from {low} to {high}, not"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(f"{rule} {_shown(value)}", param)
    number = int(value)
    if not low <= number <= high:
        raise ParameterError(f"{rule} {number}", param)
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}", name)
    try:
        number = float(value)
    except OverflowError:  # a huge int
        number = math.inf
    if not low <= number <= high:  # NaN is never within
        raise ParameterError(f"{name} must be a number from {low:g} to {high:g}, not {value}", name)
    return number


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ParameterError(f"stop must be a string or a list of strings, not {_shown(value)}", "stop")
    if len(value) > MAX_STOP_STRINGS:
        raise ParameterError(f"stop has {len(value)} strings, the limit is {MAX_STOP_STRINGS}: give fewer", "stop")
    for item in value:
        if not isinstance(item, str):
            raise ParameterError(f"stop must be a string or a list of strings, not a list with {_shown(item)}", "stop")
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise ParameterError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, not {len(item)}", "stop")
    return tuple(value)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ParameterError(f"stop_token_ids must be a list of token ids, not {_shown(value)}", "stop_token_ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ParameterError(
            f"stop_token_ids has {len(value)}, the limit is {MAX_STOP_TOKEN_IDS}: give fewer", "stop_token_ids"
        )
    names = (f"stop_token_ids[{index}]" for index in range(len(value)))
    return tuple(
        _integer(name, item, 0, MAX_INT32, f"{name}: a stop token id") for name, item in zip(names, value, strict=True)
    )


def _shown(value: object) -> str:
    """Returns a short quotation of the value for an error message, however long the value is."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
