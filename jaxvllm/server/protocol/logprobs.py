"""Log-probabilities in OpenAI's two formats, and prompts' in vLLM's."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from jaxvllm.engine.outputs import CompletionOutput, Logprob
from jaxvllm.server.protocol.fields import ALL_LOGPROBS, Reply

# JSON has no infinity. vLLM writes this number instead.
LOWEST = -9999.0

type Ranked = dict[int, Logprob]
# A token, its text and its log-probabilities, which are None for the first token of a prompt.
type Told = tuple[int, str, Ranked | None]


class TopLogprob(Reply):
    """A token that could have been chosen, in the format of chat completions."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A chosen token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """The log-probabilities of all tokens of a choice, or of a chunk of it."""

    content: list[TokenLogprob]


class CompletionLogprobs(Reply):
    """Log-probabilities in the format of completions, parallel lists. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Reply):
    """A prompt's token, or one that could have been in its place, in vLLM's format."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# One entry for each token of the prompt, by token id. It is None for the first token, which has no probability.
type PromptLogprobList = list[dict[str, PromptLogprob] | None]


def chat_logprobs(completion: CompletionOutput, count: int, as_ids: bool) -> dict[str, Any] | None:
    """Returns a `ChatLogprobs` with the `count` best of each token, or None if the request wants none."""
    if completion.logprobs is None:
        return None
    content = []
    for token_id, ranked in zip(completion.token_ids, completion.logprobs, strict=True):
        best = [_chat_entry(one, ranked, as_ids) for one in _best(ranked, count)]
        content.append(_chat_entry(token_id, ranked, as_ids) | {"top_logprobs": best})
    return {"content": content}


def token_id_logprobs(completion: CompletionOutput, count: int) -> dict[str, Any] | None:
    """Returns a `GenerateLogprobs`: each token, then itself and the `count` best. None if the request wants none."""
    if completion.logprobs is None:
        return None

    def entry(one: int, ranked: Ranked) -> dict[str, Any]:
        return {"token_id": one, "logprob": _finite(ranked[one]), "rank": ranked[one].rank}

    content = []
    for token_id, ranked in zip(completion.token_ids, completion.logprobs, strict=True):
        shown = dict.fromkeys((token_id, *_best(ranked, count)))
        content.append(entry(token_id, ranked) | {"top_logprobs": [entry(one, ranked) for one in shown]})
    return {"content": content}


def completion_logprobs(tokens: Sequence[Told], count: int, as_ids: bool, offset: int) -> dict[str, Any]:
    """Returns a `CompletionLogprobs` with the `count` best of each token, for text that begins at `offset`."""
    return {
        "tokens": [f"token_id:{one}" if as_ids else text for one, text, _ in tokens],
        "token_logprobs": [None if ranked is None else _finite(ranked[one]) for one, _, ranked in tokens],
        "top_logprobs": [None if ranked is None else _top(one, ranked, count, as_ids) for one, _, ranked in tokens],
        "text_offset": list(accumulate((len(text) for _, text, _ in tokens), initial=offset))[:-1],
    }


def prompt_logprobs(scores: Sequence[Ranked | None] | None, count: int) -> list[dict[str, Any] | None]:
    """Returns a `PromptLogprobList` with the `count` best of each token."""
    assert scores is not None, "the request wants the prompt's log-probabilities"
    return [None if ranked is None else _prompt_entry(ranked, count) for ranked in scores]


def _prompt_entry(ranked: Ranked, count: int) -> dict[str, Any]:
    shown = dict.fromkeys((next(iter(ranked)), *_best(ranked, count)))  # the first is the prompt's own token
    return {
        str(one): {
            "logprob": _finite(ranked[one]),
            "rank": ranked[one].rank,
            "decoded_token": ranked[one].decoded_token,
        }
        for one in shown
    }


def _top(token_id: int, ranked: Ranked, count: int, as_ids: bool) -> dict[str, float]:
    """Returns the chosen token and the `count` best, with their log-probabilities."""
    shown = dict.fromkeys((token_id, *_best(ranked, count)))
    return {_spelled(one, ranked, as_ids): _finite(ranked[one]) for one in shown}


def _best(ranked: Ranked, count: int) -> Sequence[int]:
    if count == ALL_LOGPROBS:
        return sorted(ranked, key=lambda one: ranked[one].rank or 1)
    # `ranked` begins with the chosen token, whatever its rank. Here it is among the best only if its rank is.
    return sorted((one for one in ranked if (ranked[one].rank or 1) <= count), key=lambda one: ranked[one].rank or 1)


def _chat_entry(token_id: int, ranked: Ranked, as_ids: bool) -> dict[str, Any]:
    token = _spelled(token_id, ranked, as_ids)
    return {"token": token, "logprob": _finite(ranked[token_id]), "bytes": list(token.encode("utf-8", "replace"))}


def _spelled(token_id: int, ranked: Ranked, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else ranked[token_id].decoded_token or ""


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
