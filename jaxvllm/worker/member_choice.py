"""`MemberChoice`: which engine of a pool gets a request."""

from collections.abc import Sequence

from jaxvllm.core.kv_events import page_keys
from jaxvllm.core.prefix_index import PrefixIndex
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.routing import POLICIES, Asked
from jaxvllm.worker import wire
from jaxvllm.worker.async_llm import AsyncLLM


class Member:
    """An engine of a pool, as a routing policy sees it."""

    def __init__(self, rank: int, llm: AsyncLLM):
        self.rank = rank
        self.llm = llm
        self.last_chosen = -1
        self.is_leaving = False  # gets no request unless no other engine is ready

    @property
    def name(self) -> str:
        return str(self.rank)

    @property
    def num_running(self) -> int:
        return min(self.llm.num_requests, self.llm.facts.max_num_seqs)

    @property
    def num_waiting(self) -> int:
        return max(self.llm.num_requests - self.llm.facts.max_num_seqs, 0)

    @property
    def num_queued_tokens(self) -> int:
        return self.llm.num_queued_tokens


class MemberChoice:
    """Chooses by a routing policy. For the policy `prefix` it remembers the prompts that each engine was sent."""

    def __init__(self, policy: str):
        """Begins without requests. Raises KeyError for a policy that is none of `core.routing.POLICIES`."""
        self._policy = POLICIES[policy]
        self._is_by_prefix = policy == "prefix"
        self._num_chosen = 0
        self._sent: PrefixIndex | None = None

    def choose(self, candidates: Sequence[Member], request: GenerationRequest, facts: wire.EngineFacts) -> Member:
        """Returns the engine that gets the request. All engines have these `facts`, of which pages count."""
        prompt = request.prompt
        if self._is_by_prefix and self._sent is None:
            self._sent = PrefixIndex(facts.num_pages)
        adapter = request.lora_request
        salt = prompt.cache_salt if adapter is None else adapter.routing_salt(prompt.cache_salt)
        keys = page_keys(prompt.token_ids, facts.page_size, salt, prompt.extra_keys) if self._is_by_prefix else []

        def num_cached(place: int) -> int:
            return 0 if self._sent is None else facts.page_size * self._sent.num_cached(candidates[place].name, keys)

        asked = Asked(len(prompt.token_ids), request.session_id, num_cached)
        chosen = candidates[self._policy(candidates, asked)]
        chosen.last_chosen = self._num_chosen
        self._num_chosen += 1
        if self._sent is not None:
            self._sent.store(chosen.name, keys)
        return chosen

    def forget(self, rank: int) -> None:
        """Takes note that an engine has been started and has nothing cached."""
        if self._sent is not None:
            self._sent.forget(str(rank))

    def forget_all(self) -> None:
        """Takes note that no engine has anything cached."""
        self._sent = None
