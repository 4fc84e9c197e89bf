"""Log-probabilities in OpenAI's two dialects."""

from collections.abc import Sequence
from typing import Any

from jaxvllm.engine.outputs import CompletionOutput, Logprob
from jaxvllm.server.protocol.fields import Reply

# JSON has no infinity; vLLM writes this.
LOWEST = -9999.0

type Ranked = dict[int, Logprob]


class TopLogprob(Reply):
    """A token that could have come, in chat's dialect."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Of all tokens of a choice, or of a chunk."""

    content: list[TokenLogprob]


class CompletionLogprobs(Reply):
    """The dialect of completions: lists side by side."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(completion: CompletionOutput, count: int, as_ids: bool) -> dict[str, Any] | None:
    """`ChatLogprobs` with the `count` best of each token; None when they were not asked for."""
    if completion.logprobs is None:
        return None
    content = []
    for token_id, ranked in zip(completion.token_ids, completion.logprobs, strict=True):
        best = [_chat_entry(one, ranked, as_ids) for one in _best(ranked, count)]
        content.append(_chat_entry(token_id, ranked, as_ids) | {"top_logprobs": best})
    return {"content": content}


def completion_logprobs(completion: CompletionOutput, count: int, as_ids: bool, offset: int) -> dict[str, Any] | None:
    """`CompletionLogprobs`, for text that begins at `offset`; None when they were not asked for."""
    if completion.logprobs is None:
        return None
    tokens, offsets = [], []
    for token_id, ranked in zip(completion.token_ids, completion.logprobs, strict=True):
        tokens.append(_spelled(token_id, ranked, as_ids))
        offsets.append(offset)
        offset += len(ranked[token_id].decoded_token or "")
    pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(ranked[token_id]) for token_id, ranked in pairs],
        "top_logprobs": [
            {
                _spelled(one, ranked, as_ids): _finite(ranked[one])
                for one in dict.fromkeys((token_id, *_best(ranked, count)))
            }
            for token_id, ranked in pairs
        ],
        "text_offset": offsets,
    }


def _best(ranked: Ranked, count: int) -> Sequence[int]:
    # The chosen token comes first and again where it belongs: with `count` ranks, no more than those.
    return sorted((one for one in ranked if (ranked[one].rank or 1) <= count), key=lambda one: ranked[one].rank or 1)


def _chat_entry(token_id: int, ranked: Ranked, as_ids: bool) -> dict[str, Any]:
    token = _spelled(token_id, ranked, as_ids)
    return {"token": token, "logprob": _finite(ranked[token_id]), "bytes": list(token.encode("utf-8", "replace"))}


def _spelled(token_id: int, ranked: Ranked, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else ranked[token_id].decoded_token or ""


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
