"""`ExportedRequest`: a request that has left one engine in the middle, and what another needs to go on with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np

from jaxvllm.core.request import GenerationRequest, Request, TokenIds
from jaxvllm.core.sampling_params import MAX_SEED, MIN_SEED
from jaxvllm.core.weight_version import WeightStarts
from jaxvllm.engine.outputs import FinishReasonName, Logprob, RequestMetrics


@dataclass(frozen=True)
class CompletionProgress:
    """The part of one completion that callers know, or will be told next."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]  # of these tokens, where the request wants them
    cumulative_logprob: float
    num_shown: int  # tokens that some output has contained
    has_news: bool  # whether there is something that no delta has contained
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None
    weight_starts: WeightStarts


@dataclass(frozen=True)
class RequestProgress:
    """The part of a request that callers know. Times are seconds from the export on, so most are negative."""

    completions: tuple[CompletionProgress, ...]
    metrics: RequestMetrics
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    was_shown: bool  # whether there has been an output


@dataclass(frozen=True)
class SamplingState:
    """The state on which the next tokens of an unfinished sequence depend, beside its parameters and its prompt."""

    seed: int
    output_token_ids: list[int]  # all that are known; a beam search has none and begins again
    num_unreported: int  # the last of them, which a constraint forced and no output has contained
    num_preemptions: int
    weight_starts: WeightStarts

    @classmethod
    def of(cls, request: Request) -> Self:
        """Returns the state of a request that has left its scheduler."""
        return cls(
            request.seed,
            request.output_token_ids.tolist(),
            request.num_unreported,
            request.num_preemptions,
            request.weight_starts,
        )

    def restore(self, request: Request) -> None:
        """Lets a new `request` for the same sequence go on from here.

        Raises ValueError where its constraint, which is as new, does not allow the tokens so far.
        """
        tokens = self.output_token_ids
        request.seed = self.seed
        request.output_token_ids = np.array(tokens, np.int32)
        request.num_unreported, request.num_preemptions = self.num_unreported, self.num_preemptions
        request.weight_starts = [*self.weight_starts]
        if request.constraint is not None and request.constraint.advance(tokens) < len(tokens):
            raise ValueError(f"request {request.request_id!r} has tokens that its structured_outputs do not allow")
        if request.repetition is not None:
            request.repetition.first_end(tokens, request.sampling_params.min_tokens)


@dataclass(frozen=True)
class ExportedRequest:
    """A request in the middle. An engine with the same weights that imports it goes on with the same tokens.

    `pages` are the full KV pages of its tokens so far in the form of `jaxvllm.kv_transfer.page_format`, by the hash of
    all tokens up to their end. An engine computes what it lacks of them.
    """

    request: GenerationRequest
    progress: RequestProgress
    sequences: Mapping[int, SamplingState]  # of the completions that have not ended, by index
    model: bytes  # the fingerprint of the page format: weights, dtypes and shapes
    pages: Mapping[bytes, bytes]
    adapter: bytes | None = None  # the digest of its adapter, if it has one: the path alone may have other content

    def check(self, num_sequences: int, vocab_size: int, limit: int) -> None:
        """Raises ValueError for a state that a request of `num_sequences` and `limit` tokens each cannot have."""
        room = limit - len(self.request.prompt.token_ids)
        ids = [token for state in self.sequences.values() for token in state.output_token_ids]
        is_right = (
            len(self.progress.completions) == num_sequences
            and self.sequences.keys() == {i for i, c in enumerate(self.progress.completions) if c.finish_reason is None}
            and all(
                len(state.output_token_ids) < room
                and 0 <= state.num_unreported <= len(state.output_token_ids)
                and MIN_SEED <= state.seed <= MAX_SEED
                for state in self.sequences.values()
            )
            and all(0 <= token < vocab_size for token in ids)
        )
        if not is_right or not self.sequences:
            raise ValueError(f"the state of request {self.request.request_id!r} is not one that an engine has exported")

    def to_bytes(self) -> bytes:
        """Returns it as bytes for another process or machine."""
        return _encoder.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ExportedRequest":
        """Reads what `to_bytes` wrote. Raises ValueError for anything else."""
        exported: ExportedRequest = _decoder.decode(data)  # msgspec's errors are ValueErrors
        return exported


def _decode_token_ids(_: Any, data: bytes) -> TokenIds:
    if len(data) % np.dtype(np.int32).itemsize:
        raise ValueError("token ids are four bytes each")
    return np.frombuffer(data, np.int32)


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda token_ids: token_ids.data)
_decoder = msgspec.msgpack.Decoder(ExportedRequest, dec_hook=_decode_token_ids)
