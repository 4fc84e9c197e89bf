"""`CachedPrefixes`: which server has cached how much of a prompt, as far as their KV events tell."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from jaxvllm.core.kv_events import page_keys
from jaxvllm.core.prefix_index import KVEventReader, PrefixIndex
from jaxvllm.router.forwarding import ForwardedRequest
from jaxvllm.server.errors import ApiError
from jaxvllm.worker.kv_event_subscriber import follow_kv_events

logger = logging.getLogger(__name__)

# A server that takes longer to say which tokens a prompt has is busy: the request goes on without that knowledge.
TOKENIZE_SECONDS = 1.0
# The fields of a request that make its prompt, with the names that `/tokenize` has for them.
_OF_PROMPTS = ("model", "prompt", "add_special_tokens")
_OF_MESSAGES = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "add_special_tokens",
)


class CachedPrefixes:
    """Follows the KV events of servers by their names, each of an endpoint and perhaps of one for missed batches."""

    def __init__(self, endpoints: Mapping[str, tuple[str, str | None]]):
        self._endpoints = endpoints
        self._index = PrefixIndex()

    async def follow(self) -> None:
        """Reads events until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, (endpoint, replay) in self._endpoints.items():
                tasks.create_task(follow_kv_events(KVEventReader(self._index, name), endpoint, replay))

    async def read(self, client: httpx.AsyncClient, url: str, request: ForwardedRequest) -> "PromptPrefixes":
        """Returns the prompt of a request as it is named in events. The server at `url` says what its tokens are.

        It is empty where the body has no prompt, or the server does not say: then no server is preferred.
        """
        if self._index.page_size is None:  # nothing is cached anywhere
            return PromptPrefixes()
        try:
            asked = json.loads(request.body)
            token_ids = await _token_ids(client, url, request, asked)
            texts = (text if isinstance(text := asked.get(name), str) else None for name in ("model", "cache_salt"))
            return PromptPrefixes(self._index, token_ids, *texts)
        except (ValueError, OverflowError, TypeError, AttributeError, KeyError, ApiError, httpx.HTTPError) as error:
            logger.debug("the tokens of a prompt are unknown: %r", error)
            return PromptPrefixes()


class PromptPrefixes:
    """A prompt, and how much of it each server has cached. Without tokens it is one of which nothing is known."""

    def __init__(
        self,
        index: PrefixIndex | None = None,
        token_ids: Sequence[int] = (),
        model: str | None = None,
        salt: str | None = None,
    ):
        """Takes the prompt of a request for `model`, which may be an adapter."""
        self.num_tokens = len(token_ids)
        self._index = index
        self._token_ids = np.array(token_ids, np.int32)
        self._model, self._salt = model, salt
        self._keys: dict[str | None, Sequence[int]] = {}  # by salt, which servers may have read other adapters for

    def num_cached(self, name: str) -> int:
        """Returns how many tokens of it the server of this name has cached."""
        if self._index is None or (page_size := self._index.page_size) is None:
            return 0
        try:
            salt = self._index.salt(name, self._model, self._salt)
        except KeyError:  # the server has no page of this adapter
            return 0
        if salt not in self._keys:
            self._keys[salt] = page_keys(self._token_ids, page_size, salt)
        return self._index.num_cached(name, self._keys[salt]) * page_size


async def _token_ids(
    client: httpx.AsyncClient, url: str, request: ForwardedRequest, asked: Mapping[str, Any]
) -> Sequence[int]:
    """Returns the tokens of a request's prompt: it may consist of them, or else the server at `url` is asked."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list):
        if not all(type(token) is int for token in prompt):
            raise ValueError("several prompts, or none")
        return prompt
    names = _OF_MESSAGES if prompt is None else _OF_PROMPTS
    question = {name: asked[name] for name in names if asked.get(name) is not None}
    asking = replace(request, target=b"/tokenize", body=json.dumps(question).encode())
    answer = await asking.send(client, url, TOKENIZE_SECONDS)
    answer.raise_for_status()
    token_ids: list[int] = answer.json()["tokens"]
    return token_ids
