"""`Pooler` makes one vector of a prompt's hidden states, and `Pooling` is one request's choice of it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.pooling_params import PoolingParams
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams

# LAST: the hidden state of the prompt's last token. MEAN: the mean over all tokens.
PoolingType = Literal["LAST", "MEAN"]


@dataclass(frozen=True)
class Pooling:
    """The vector that a request gets: it is pooled, then cut, then perhaps normalized, in this order."""

    kind: PoolingType
    dimensions: int  # of the vector
    normalizes: bool
    skips_cache: bool = False  # also where pages of the prompt are cached that could be used

    @property
    def reads_all(self) -> bool:
        """Whether each token's hidden state is needed. Then the request cannot begin after pages that are cached."""
        return self.kind == "MEAN" or self.skips_cache

    @staticmethod
    def sampling_params(keep: int | None = None) -> SamplingParams:
        """Returns the parameters of a request that is pooled. A token is sampled, which nobody gets to see.

        `keep`: how many of a prompt's last tokens, as `truncate_prompt_tokens`.
        """
        final = RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, output_kind=final, truncate_prompt_tokens=keep
        )

    def finish(self, total: NDArray[np.float32], num_tokens: int) -> NDArray[np.float32]:
        """Returns the vector f32[dimensions] of the last hidden state f32[E], or of the sum over `num_tokens`."""
        vector = total / np.float32(num_tokens) if self.kind == "MEAN" else total
        vector = vector[: self.dimensions]
        if self.normalizes:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)


@dataclass(frozen=True)
class Pooler:
    """The pooling of one engine: how it pools, and what requests may choose."""

    kind: PoolingType
    size: int  # of a hidden state
    normalizes: bool = True
    dimensions: int | None = None  # of vectors whose requests do not say; None: all
    # Dimensions that the model was trained for, beside all of them. True: any. False: no other.
    matryoshka: tuple[int, ...] | bool = False

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            self._check(self.dimensions)

    def resolve(self, params: PoolingParams) -> Pooling:
        """Returns what a request with `params` gets. Raises ParameterError for dimensions that vectors cannot have."""
        if params.dimensions is not None:
            self._check(params.dimensions)
        normalizes = self.normalizes if params.use_activation is None else params.use_activation
        skips = bool(params.skip_reading_prefix_cache)
        return Pooling(self.kind, params.dimensions or self.dimensions or self.size, normalizes, skips)

    def _check(self, dimensions: int) -> None:
        if dimensions > self.size:
            raise ParameterError(
                f"dimensions {dimensions} exceeds {self.size}, the size of this model's vectors: ask for fewer",
                "dimensions",
            )
        if dimensions == self.size or self.matryoshka is True:
            return
        if not self.matryoshka:
            raise ParameterError(
                f"dimensions {dimensions} cannot be had: this model was not trained for vectors shorter than "
                f"{self.size} (its config has no is_matryoshka and no matryoshka_dimensions). Leave it out",
                "dimensions",
            )
        if dimensions not in self.matryoshka:
            raise ParameterError(
                f"dimensions {dimensions} cannot be had: this model's vectors may have {sorted(self.matryoshka)}",
                "dimensions",
            )
