"""Logits processors: functions of a caller's own that become part of the compiled step of an offline engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TokensSoFar:
    """The tokens of R requests, prompt first. What lies after a row's `num_tokens` has no meaning."""

    token_ids: jax.Array  # i32[R, the most tokens that a request may have]; 0 where a side input has the values
    num_tokens: jax.Array  # i32[R]
    num_prompt_tokens: jax.Array  # i32[R]


# Returns what it makes of the logits f32[R, V] for the next tokens of R requests. JAX traces it, so it can read no
# values and must not depend on R. Rows that pad a batch go through it too.
type LogitsProcessor = Callable[[jax.Array, TokensSoFar], jax.Array]


def run_processors(processors: Sequence[LogitsProcessor], logits: jax.Array, tokens: TokensSoFar) -> jax.Array:
    """Returns what `processors`, in order, make of whole rows of logits.

    Raises ValueError for one that returns others.
    """
    for processor in processors:
        given, logits = logits, jnp.asarray(processor(logits, tokens))
        if (logits.shape, logits.dtype) != (given.shape, given.dtype):
            name = getattr(processor, "__name__", repr(processor))
            raise ValueError(
                f"logits processor {name} must return {given.dtype}{list(given.shape)}, as it was given, not "
                f"{logits.dtype}{list(logits.shape)}"
            )
    return logits
