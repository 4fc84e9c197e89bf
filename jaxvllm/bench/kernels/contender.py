"""The contenders of a measurement and their outcomes: ours, the reference and every peer have this form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from jaxvllm.bench.kernels.timing import Timing
from pallas_kernels.ragged_paged_attention.cases import RaggedCase

# The largest error of a token's head, relative to attention in float32 on the same values. NaN passes no comparison.
MAX_ERROR = {jnp.dtype(jnp.bfloat16): 2e-2, jnp.dtype(jnp.float16): 1e-2, jnp.dtype(jnp.float32): 1e-3}


@dataclass(frozen=True)
class LayerOutcome:
    """The time of one layer's call and the error of its numbers, or the reason why there is no time."""

    timing: Timing | None
    error: float | None  # None: nothing could be compared
    problem: str | None = None
    outputs: np.ndarray | None = None  # f[<= 256, H, D]: some tokens at full size, to compare contenders
    details: Mapping[str, int | float | str] = field(default_factory=dict)

    @classmethod
    def without(cls, problem: str, error: float | None = None) -> "LayerOutcome":
        return cls(timing=None, error=error, problem=problem)


class Contender(Protocol):
    """A contender. `run` raises NotImplementedError, with the reason, for a case or a machine that it cannot serve."""

    @property
    def name(self) -> str: ...

    def versions(self) -> Mapping[str, str]: ...

    def run(self, case: RaggedCase, dtype: jnp.dtype) -> LayerOutcome: ...


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest relative error of a token's head, of [T, H, D]. NaN counts as infinite."""
    difference = out.astype(np.float64) - expected.astype(np.float64)
    errors = np.linalg.norm(difference, axis=-1) / np.linalg.norm(expected.astype(np.float64), axis=-1)
    return float(np.nan_to_num(errors, nan=np.inf).max())
