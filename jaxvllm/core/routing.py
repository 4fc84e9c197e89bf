"""Routing policies: which of several equal replicas gets a request.

A policy does not care where loads and hashes come from. Between the replicas of one engine they are the schedulers' own
(`engine/router.py`). Between servers they are metrics and what KV events tell (`core/prefix_index.py`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# A running request shares steps that are computed anyway, while a waiting one is work not begun. The weight is vLLM's.
WAITING_WEIGHT = 4
# Tokens that a running request is taken to want still: half an answer of 128. A cached prefix of 1024 tokens then
# outweighs 16 running requests. The value hardly matters: in a simulation by hand (four replicas with room for 14 of 40
# prefixes of that length) the median time to the first token was 16 to 19 ms with all from 0 to 256, and 18 to 67 ms
# with `least_load`.
TOKENS_PER_RUNNING = 64


class Candidate(Protocol):
    """A replica that may get a request. A policy asks for what it needs, so a property may cost something."""

    @property
    def name(self) -> str:
        """Tells it from the others, and stays the same while others come and go."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of prompts that are not computed yet, of requests that wait or run."""

    @property
    def last_chosen(self) -> int:
        """Larger for the one of two that was chosen later."""


@dataclass(frozen=True)
class Asked:
    """The part of a request that a policy sees."""

    num_tokens: int  # of its prompt
    session_id: str | None
    # How many of these tokens the candidate at this place has cached. Asked only where it matters: hashing takes time.
    num_cached: Callable[[int], int]


type Policy = Callable[[Sequence[Candidate], Asked], int]


def load(candidate: Candidate) -> int:
    """Returns how busy a replica is, in running requests."""
    return WAITING_WEIGHT * candidate.num_waiting + candidate.num_running


def least_load(candidates: Sequence[Candidate], asked: Asked) -> int:
    """Returns the place of the least loaded candidate.

    If several have the same load, it chooses the one with most of the prompt cached, and then the one that was chosen
    longest ago.
    """
    loads = [load(candidate) for candidate in candidates]
    least = [place for place, of in enumerate(loads) if of == min(loads)]
    if len(least) == 1:
        return least[0]
    return min(least, key=lambda place: (-asked.num_cached(place), candidates[place].last_chosen))


def prefix(candidates: Sequence[Candidate], asked: Asked) -> int:
    """Returns the place of the candidate that has the fewest tokens to compute before and beside this prompt.

    These are the prompt's tokens that are not cached there, the prompts queued before it, and `TOKENS_PER_RUNNING` for
    each running request. So a cached prefix attracts a request unless the replica has that much more to do than
    another. If several have the same cost, it chooses the one that was chosen longest ago.
    """

    def cost(place: int) -> int:
        one = candidates[place]
        return one.num_queued_tokens + TOKENS_PER_RUNNING * one.num_running + asked.num_tokens - asked.num_cached(place)

    return min(range(len(candidates)), key=lambda place: (cost(place), candidates[place].last_chosen))


def session(candidates: Sequence[Candidate], asked: Asked) -> int:
    """Returns the place of the candidate that the session belongs to, whatever the loads are.

    Each candidate draws a number from the session and its own name, and the highest wins. So where one comes, sessions
    move to it alone, and where one goes, only its own sessions move. A request without a session goes to the least
    loaded candidate.
    """
    if asked.session_id is None:
        return least_load(candidates, asked)
    session_id = asked.session_id.encode()

    def draw(place: int) -> bytes:
        # The length keeps "a" and "bc" apart from "ab" and "c".
        name = candidates[place].name.encode()
        return hashlib.sha256(len(name).to_bytes(4, "big") + name + session_id).digest()

    return max(range(len(candidates)), key=draw)


POLICIES: Mapping[str, Policy] = {"least-load": least_load, "prefix": prefix, "session": session}
