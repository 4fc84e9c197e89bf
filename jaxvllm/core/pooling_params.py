"""`PoolingParams`: what a caller wants of a prompt's hidden states, with vLLM's names."""

from dataclasses import dataclass

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.value_checks import MAX_INT32, boolean, integer


@dataclass(frozen=True)
class PoolingParams:
    """The wishes of a request for one vector of its prompt. How it is pooled is the engine's (`PoolerConfig`)."""

    dimensions: int | None = None  # the first so many numbers of the vector; None: all
    use_activation: bool | None = None  # whether the vector gets length 1; None: as the engine does
    truncate_prompt_tokens: int | None = None  # only so many of the prompt's last tokens; -1: as many as fit
    skip_reading_prefix_cache: bool | None = None  # None: where the vector needs all hidden states

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            object.__setattr__(self, "dimensions", integer("dimensions", self.dimensions, 1, MAX_INT32))
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                boolean(name, getattr(self, name))
        if self.truncate_prompt_tokens is not None:
            kept = integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32)
            if kept == 0:
                raise ParameterError("truncate_prompt_tokens must be -1 or at least 1, not 0", "truncate_prompt_tokens")
            object.__setattr__(self, "truncate_prompt_tokens", kept)
