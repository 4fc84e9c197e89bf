"""`SamplingParams`: the options of one completion, checked when they are constructed."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from jaxvllm.core.errors import ParameterError, UnsupportedParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.core.value_checks import MAX_INT32, boolean, integer, number, shown, strings, token_biases, token_ids

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
MAX_LOGPROBS = 20  # that every step can yield; more of them, or chosen ones, take a program of their own
# The limits below are vLLM's.
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BIAS = 100.0  # biases beyond it mean the same as it
MAX_PENALTY = 2.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

# What is reported as log-probabilities: of the model's own distribution, a grammar's mask included, or of the one that
# is drawn from; and normalized, or as logits.
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

# vLLM has or had these options, and this engine has them in another place or not at all.
UNSUPPORTED = {
    "early_stopping": "use LLM.beam_search and its BeamSearchParams",
    "guided_decoding": "its name is structured_outputs now",
    "length_penalty": "use LLM.beam_search and its BeamSearchParams",
    "logits_processors": "give LLM the functions, for all requests",
    "use_beam_search": "use LLM.beam_search and its BeamSearchParams",
}

# The parameters that leave the model's logits as they are, beside those that the temperature divides.
_WITHOUT_RULES = frozenset(
    "n best_of temperature structured_outputs thinking_token_budget repetition_detection seed stop stop_token_ids "
    "ignore_eos max_tokens logprobs prompt_logprobs logprob_token_ids truncate_prompt_tokens skip_reading_prefix_cache "
    "flat_logprobs stream_interval extra_args skip_clone detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output output_kind".split()
)
_FILTERS = frozenset({"top_k", "top_p", "min_p"})  # of random rows


class RequestOutputKind(enum.Enum):
    """Says what each output before the last one carries: all the text so far, only the new text, or nothing."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """Ends a completion whose last tokens are one pattern, `min_count` times in a row. The names are vLLM's."""

    max_pattern_size: int = 0  # tokens; 0 = off
    min_pattern_size: int = 0  # tokens; 0 means 1
    min_count: int = 0  # at least 2 where it is on

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 0, MAX_INT32))
        if self.min_pattern_size > self.max_pattern_size:
            raise ParameterError(
                f"min_pattern_size {self.min_pattern_size} exceeds max_pattern_size {self.max_pattern_size}: lower it",
                "min_pattern_size",
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ParameterError(f"min_count must be at least 2, not {self.min_count}", "min_count")

    @classmethod
    def of(cls, value: object) -> "RepetitionDetectionParams | None":
        """Returns `value`, which may also be None or a mapping with the names of the fields."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, dict) or not value.keys() <= {"max_pattern_size", "min_pattern_size", "min_count"}:
            raise ParameterError(
                "repetition_detection must be an object with max_pattern_size, min_pattern_size and min_count, not "
                f"{shown(value)}",
                "repetition_detection",
            )
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options that say how to draw one request's tokens and when to stop. The names and meanings are vLLM's.

    Every instance is valid: the constructor raises ValueError for a bad value, NotImplementedError for an option of
    vLLM that this engine lacks, and TypeError for an unknown option. Lists are stored as tuples, and `logit_bias`, a
    mapping, as sorted pairs; a caller may also give None, (as `stop`) one string, and objects of JSON as mappings.

    The device computes in float32. A number closer to zero than float32 can hold means the same as zero itself would:
    such a temperature is greedy, such a top_p keeps only the most probable token, and such a min_p is off.
    """

    n: int = 1  # completions of one prompt
    best_of: int | None = None  # completions to generate; the n that are most likely as a whole are returned
    temperature: float = 1.0  # higher is more random; 0 = greedy, and so is anything below 1e-5
    top_p: float = 1.0  # smallest set of tokens with this much probability, at least one token; 1 = off
    top_k: int = 0  # the k most probable tokens; 0 or -1 = off, kept as 0
    min_p: float = 0.0  # tokens with at least this share of the best one's probability; 0 = off
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies others; 1 = off
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the output has; -2 to 2
    frequency_penalty: float = 0.0  # subtracted once for each time that the output has the token; -2 to 2
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens; -100 to 100
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is drawn; None = all are allowed
    bad_words: tuple[str, ...] = ()  # no token is drawn that would complete one of these
    structured_outputs: StructuredOutputsParams | None = None  # the form that the text must have
    thinking_token_budget: int | None = None  # tokens of reasoning, after which the reasoning is ended; -1 = no limit
    repetition_detection: RepetitionDetectionParams | None = None  # ends an output that repeats itself
    seed: int | None = None  # the same seed draws the same tokens; 64 bits; None = the engine draws one, as for -1
    stop: tuple[str, ...] = ()  # texts that end the output
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the output
    ignore_eos: bool = False  # the output does not end where the model ends it
    max_tokens: int | None = 16  # of the output, at most; None = all that fit the model, 0 = only score the prompt
    min_tokens: int = 0  # EOS and stop tokens are not drawn before; stop strings are not looked for
    logprobs: int | None = None  # best tokens to report beside the chosen one; 0 = the chosen one alone, -1 = all
    prompt_logprobs: int | None = None  # best tokens to report beside each of the prompt's; no prefix cache then
    logprob_token_ids: tuple[int, ...] | None = None  # report exactly these beside the chosen one
    truncate_prompt_tokens: int | None = None  # keep only the prompt's last tokens; -1 = as many as fit the model
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt
    flat_logprobs: bool = False  # log-probabilities come as FlatLogprobs, a few long lists
    stream_interval: int | None = None  # new tokens for which an output of a stream waits, but for the first and last
    extra_args: dict[str, Any] | None = None  # for code of the caller's own: the engine only checks and keeps them
    skip_clone: bool = False  # has no effect: parameters never change, so they are never copied
    detokenize: bool = True
    skip_special_tokens: bool = True  # texts are without them
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # the text ends with the stop string
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __new__(cls, **options: Any) -> Self:
        for name in UNSUPPORTED.keys() & options:
            raise UnsupportedParameterError(f"SamplingParams.{name} is not supported: {UNSUPPORTED[name]}", name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", integer("n", self.n, 1, MAX_N))
        if self.best_of is not None:
            best_of = integer("best_of", self.best_of, 1, MAX_N)
            if best_of < self.n:
                raise ParameterError(f"best_of {best_of} is less than n {self.n}: raise it, or lower n", "best_of")
            put(self, "best_of", best_of if best_of > self.n else None)  # nothing to choose
        put(self, "temperature", number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        put(self, "top_p", number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ParameterError("top_p must be above 0 and at most 1, not 0: for greedy set temperature=0", "top_p")
        put(self, "top_p", max(self.top_p, MIN_FLOAT32))
        put(self, "top_k", max(integer("top_k", self.top_k, -1, MAX_INT32), 0))
        put(self, "min_p", number("min_p", self.min_p, 0.0, 1.0))
        if self.min_p < MIN_FLOAT32:
            put(self, "min_p", 0.0)
        if self.seed == -1:  # as in vLLM
            put(self, "seed", None)
        elif self.seed is not None:
            put(self, "seed", integer("seed", self.seed, MIN_SEED, MAX_SEED))
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY))
        put(self, "repetition_penalty", number("repetition_penalty", self.repetition_penalty, MIN_FLOAT32, 1e6))
        put(self, "logit_bias", token_biases("logit_bias", self.logit_bias, MAX_LOGIT_BIASES, MAX_BIAS))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, "an allowed token")
            put(self, "allowed_token_ids", allowed)
            if not allowed:
                raise ParameterError("allowed_token_ids must have at least one token", "allowed_token_ids")
        put(self, "bad_words", strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, "a bad word"))
        put(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.thinking_token_budget is not None:
            budget = integer("thinking_token_budget", self.thinking_token_budget, -1, MAX_INT32)
            put(self, "thinking_token_budget", None if budget == -1 else budget)
        put(self, "repetition_detection", RepetitionDetectionParams.of(self.repetition_detection))
        put(self, "stop", strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS, "a stop string"))
        stop_token_ids = token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "a stop token id")
        put(self, "stop_token_ids", stop_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                put(self, name, integer(name, value, -1, MAX_INT32))
        if self.logprob_token_ids is not None:
            wanted = token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS, "a token id")
            put(self, "logprob_token_ids", wanted or None)
        if self.truncate_prompt_tokens is not None:
            kept = integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32)
            if kept == 0:
                raise ParameterError("truncate_prompt_tokens must be -1 or at least 1, not 0", "truncate_prompt_tokens")
            put(self, "truncate_prompt_tokens", kept)
        if self.skip_reading_prefix_cache is not None:
            boolean("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if self.stream_interval is not None:
            put(self, "stream_interval", integer("stream_interval", self.stream_interval, 1, MAX_INT32))
        if self.extra_args is not None:
            put(self, "extra_args", _extra_args(self.extra_args))
        if self.max_tokens is not None:
            fewest = 1 if self.prompt_logprobs is None else 0
            if self.max_tokens == 0 < fewest:
                raise ParameterError(
                    f"max_tokens must be an integer from 1 to {MAX_INT32}, not 0: 0 only scores the prompt, and needs "
                    "prompt_logprobs",
                    "max_tokens",
                )
            put(self, "max_tokens", integer("max_tokens", self.max_tokens, fewest, MAX_INT32))
        put(self, "min_tokens", integer("min_tokens", self.min_tokens, 0, MAX_INT32))
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
            "flat_logprobs",
            "skip_clone",
        ):
            boolean(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ParameterError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}", "output_kind")
        if self.best_of is not None and self.output_kind is RequestOutputKind.DELTA:
            raise ParameterError(
                f"best_of {self.best_of} cannot stream: which completions are the best is known at the end. Do not "
                "stream, or leave it out",
                "best_of",
            )
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

    @property
    def wants_logprobs(self) -> bool:
        """Whether the caller wants log-probabilities of the output's tokens."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def wants_distributions(self) -> bool:
        """Whether these are more, or others, than the best few, which every step can yield."""
        return self.logprob_token_ids is not None or (
            self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS
        )

    @property
    def is_penalized(self) -> bool:
        """Whether tokens that the request has already are penalized. Then its tokens are counted."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def has_logit_rules(self) -> bool:
        """Whether any parameter beside the temperature changes the model's logits. Masks of the host are none.

        A parameter that is new counts as one that does, until it is listed here.
        """
        ignored = _WITHOUT_RULES | (_FILTERS if self.greedy else frozenset())
        return any(getattr(self, one.name) != one.default for one in fields(self) if one.name not in ignored)

    @property
    def wants_wide_scores(self) -> bool:
        """Whether the caller wants more log-probabilities of the prompt's tokens than the best few."""
        return self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS

    def num_prompt_logprobs(self, vocab_size: int) -> int:
        """Returns how many log-probabilities the caller wants of each token of the prompt, beside the token's own."""
        return vocab_size if self.prompt_logprobs == -1 else min(self.prompt_logprobs or 0, vocab_size)

    def num_logprobs(self, vocab_size: int) -> int:
        """Returns how many log-probabilities the caller wants of each token of the output, beside the token's own."""
        if self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return vocab_size if self.logprobs == -1 else min(self.logprobs or 0, vocab_size)

    @property
    def num_sequences(self) -> int:
        """The number of completions that are generated. With `best_of`, more are generated than returned."""
        return self.n if self.best_of is None else self.best_of

    def child(self, index: int) -> "SamplingParams":
        """Returns the parameters of completion `index`: `n` is 1, and each has its own seed if one was given.

        All completions share the prompt, so only the first scores it, unless scores are all there is to compute. With
        `best_of`, each has log-probabilities: they decide which completions are returned.
        """
        if self.num_sequences == 1 and index == 0:
            return self
        seed = self.seed
        if seed is not None:
            seed = (seed + index - MIN_SEED) % 2**64 + MIN_SEED  # wraps around: any int64 seed has n children
        scores = self.prompt_logprobs if index == 0 or self.scores_only else None
        logprobs = 0 if self.best_of is not None and self.logprobs is None else self.logprobs
        return replace(self, n=1, best_of=None, seed=seed, prompt_logprobs=scores, logprobs=logprobs)


def _extra_args(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ParameterError(f"extra_args must be a mapping with names as keys, not {shown(value)}", "extra_args")
    if "kv_transfer_params" in value:
        raise UnsupportedParameterError("extra_args.kv_transfer_params is not supported: leave it out", "extra_args")
    return dict(value)
