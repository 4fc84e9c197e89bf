"""What a user asks of speculative decoding, by vLLM's names."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, Self, get_args

Method = Literal["ngram", "draft_model", "eagle", "eagle3", "medusa", "mtp"]
MAX_DRAFTS = 15  # of a row in a step
_OF_MODELS = ("draft_model", "eagle", "eagle3", "medusa")  # which need a model


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which proposer guesses, and how many tokens at once. Raises ValueError for values that are out of range."""

    method: Method
    model: str | None = None  # the draft: a directory, or a name on the hub; mtp: the model itself has it
    num_speculative_tokens: int = 3  # of a row in a step
    prompt_lookup_min: int = 2  # ngram: tokens that must be the same before what is guessed
    prompt_lookup_max: int = 5  # ngram: the most that are compared

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r}")
        if (self.model is not None) != (self.method in _OF_MODELS):
            rule = "needs a model" if self.model is None else "has no model"
            raise ValueError(f"method {self.method} {rule}: those with one are {', '.join(_OF_MODELS)}")
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ValueError(f"model must be a directory or a name on the hub, not {self.model!r}")
        for name, most in (
            ("num_speculative_tokens", MAX_DRAFTS),
            ("prompt_lookup_max", 32),
            ("prompt_lookup_min", self.prompt_lookup_max),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most}, not {value!r}")

    @classmethod
    def read(cls, value: object) -> Self:
        """Reads a mapping or a JSON object. Raises ValueError for anything else, and for unknown names."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                pass
        try:
            if not isinstance(value, Mapping):
                raise ValueError(f"must be a JSON object, not {value!r}")
            names = [field.name for field in fields(cls)]
            if unknown := [str(name) for name in value if name not in names]:
                raise ValueError(f"has no {unknown[0]!r}: it may have {', '.join(names)}")
            if "method" not in value:
                raise ValueError("needs a method")
            return cls(**value)
        except ValueError as error:
            example = '{"method": "ngram", "num_speculative_tokens": 3}'
            raise ValueError(f"speculative_config {error}; an example: {example}") from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))
