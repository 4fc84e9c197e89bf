"""Pools of equal servers: which of them are ready, how busy they are, and which gets the next request."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import httpx

from jaxvllm.core.routing import POLICIES, Asked
from jaxvllm.router.prefixes import PromptPrefixes

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = 5.0
UNKNOWN = PromptPrefixes()


class Upstream:
    """One server, as a routing policy sees it: what this router has sent to it and what has not come back."""

    def __init__(self, url: str):
        self.name = url.rstrip("/")
        self.num_running = 0
        self.num_waiting = 0  # what waits in there is counted as running: this router cannot tell
        self.num_queued_tokens = 0
        self.last_chosen = -1
        self.is_ready = False  # until it has said so
        self.num_sent = 0
        self.num_failed = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request as running inside the context."""
        self.num_running += 1
        self.num_sent += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """Counts tokens of a prompt as queued inside the context."""
        self.num_queued_tokens += num_tokens
        try:
            yield
        finally:
            self.num_queued_tokens -= num_tokens

    def failed(self, error: Exception) -> None:
        """Takes note that the server did not answer. It gets no requests until it is ready again."""
        self.num_failed += 1
        if self.is_ready:
            why = str(error) or type(error).__name__
            logger.warning("%s does not answer (%s): it gets no requests until it is ready", self.name, why)
        self.is_ready = False


class ServerPool:
    """Servers that may stand in for each other."""

    def __init__(self, urls: Sequence[str], routing: str):
        self.upstreams = [Upstream(url) for url in urls]
        self._policy = POLICIES[routing]
        self._num_chosen = 0

    @property
    def is_ready(self) -> bool:
        """Whether any of them is."""
        return any(upstream.is_ready for upstream in self.upstreams)

    @property
    def first_ready(self) -> Upstream | None:
        """One that is ready, to ask what any of them knows."""
        return next((upstream for upstream in self.upstreams if upstream.is_ready), None)

    def choose(
        self, session_id: str | None, tried: Collection[Upstream] = (), prompt: PromptPrefixes = UNKNOWN
    ) -> Upstream | None:
        """Returns the server for the next request, none of those that were `tried`. None: there is no other.

        Where none is said to be ready, one is tried anyway: it may have just come back.
        """
        left = [upstream for upstream in self.upstreams if upstream not in tried]
        ready = [upstream for upstream in left if upstream.is_ready]
        candidates = ready or ([] if tried else left)
        if not candidates:
            return None
        asked = Asked(prompt.num_tokens, session_id, lambda place: prompt.num_cached(candidates[place].name))
        chosen = candidates[self._policy(candidates, asked)]
        chosen.last_chosen = self._num_chosen
        self._num_chosen += 1
        return chosen

    async def probe(self, client: httpx.AsyncClient, seconds: float) -> None:
        """Looks every so many `seconds` whether each server is ready, for ever."""
        while True:
            await asyncio.sleep(seconds)
            await self.look(client)

    async def look(self, client: httpx.AsyncClient) -> None:
        """Asks each server whether it is ready."""
        await asyncio.gather(*(self._look(client, upstream) for upstream in self.upstreams))

    async def _look(self, client: httpx.AsyncClient, upstream: Upstream) -> None:
        try:
            response = await client.get(f"{upstream.name}/ready", timeout=PROBE_TIMEOUT)
            if response.status_code == 404:  # vLLM has no such page, and is ready when it is there
                response = await client.get(f"{upstream.name}/health", timeout=PROBE_TIMEOUT)
        except httpx.HTTPError as error:
            if upstream.is_ready:
                logger.warning("%s is not ready: %s", upstream.name, str(error) or type(error).__name__)
            upstream.is_ready = False
        else:
            was_ready, upstream.is_ready = upstream.is_ready, response.status_code == 200
            if was_ready != upstream.is_ready:
                logger.info("%s is %s", upstream.name, "ready" if upstream.is_ready else "not ready")
