"""Routing policies against their definitions, and what each of them is for."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxvllm.core.routing import POLICIES, TOKENS_PER_RUNNING, Asked, least_load, load, prefix, session


@dataclass(frozen=True)
class Replica:
    name: str = "0"
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    last_chosen: int = -1
    num_cached: int = 0  # of the prompt that is asked for


REPLICAS = st.lists(
    st.builds(
        Replica,
        name=st.sampled_from("abcdefgh"),
        num_running=st.integers(0, 3),
        num_waiting=st.integers(0, 2),
        num_queued_tokens=st.sampled_from([0, 64, 100]),
        last_chosen=st.integers(-1, 20),
        num_cached=st.sampled_from([0, 64, 128]),
    ),
    min_size=1,
    max_size=6,
    unique_by=(lambda one: one.name, lambda one: one.last_chosen),
)


def asked(replicas: Sequence[Replica], session_id: str | None = None, num_tokens: int = 200) -> Asked:
    return Asked(num_tokens, session_id, lambda place: replicas[place].num_cached)


@given(REPLICAS, st.sampled_from(sorted(POLICIES)))
def test_each_policy_takes_the_best_by_its_own_order(replicas: list[Replica], policy: str) -> None:
    orders: dict[str, Callable[[Replica], object]] = {
        "least-load": lambda one: (4 * one.num_waiting + one.num_running, -one.num_cached, one.last_chosen),
        "prefix": lambda one: (
            one.num_queued_tokens + 64 * one.num_running + 200 - one.num_cached,
            one.last_chosen,
        ),
    }
    orders["session"] = orders["least-load"]  # of a request without a session
    chosen = POLICIES[policy](replicas, asked(replicas))
    assert replicas[chosen] == min(replicas, key=orders[policy])


@given(REPLICAS)
def test_load_alone_hashes_no_prompt(replicas: list[Replica]) -> None:
    def not_asked(place: int) -> int:
        raise AssertionError("the prompt was hashed")

    if [load(one) for one in replicas].count(min(map(load, replicas))) == 1:
        least_load(replicas, Asked(200, None, not_asked))
    session(replicas, Asked(200, "talk", not_asked))


@given(REPLICAS)
def test_a_replica_that_is_chosen_for_a_prefix_has_no_more_to_do_than_the_prefix_saves(replicas: list[Replica]) -> None:
    chosen = replicas[prefix(replicas, asked(replicas))]

    def to_do(one: Replica) -> int:
        return one.num_queued_tokens + TOKENS_PER_RUNNING * one.num_running

    assert all(to_do(chosen) - to_do(one) <= chosen.num_cached - one.num_cached for one in replicas)


def test_a_prefix_attracts_requests_until_its_replica_is_busy() -> None:
    cached, empty = Replica("a", num_cached=192), Replica("b", num_running=1)
    chosen = [prefix(pair, asked(pair)) for count in range(6) for pair in [[replace(cached, num_running=count), empty]]]
    assert chosen == [0, 0, 0, 0, 0, 1]  # four running cost as much as one and the prompt: then the first is chosen
    waiting = [replace(cached, num_queued_tokens=300), empty]
    assert prefix(waiting, asked(waiting)) == 1


# ---- sessions ----


@given(REPLICAS, st.text(min_size=1))
def test_a_session_stays_where_it_is_when_another_replica_goes(replicas: list[Replica], session_id: str) -> None:
    chosen = replicas[session(replicas, asked(replicas, session_id))]
    for gone in replicas:
        left = [one for one in replicas if one is not gone]
        if left and gone is not chosen:
            busier = [replace(one, num_waiting=one.num_waiting + 5, last_chosen=one.last_chosen + 7) for one in left]
            shuffled = busier[::-1]
            assert shuffled[session(shuffled, asked(shuffled, session_id))].name == chosen.name


def test_sessions_are_shared_out_evenly() -> None:
    replicas = [Replica(f"http://10.0.0.{index}:8000") for index in range(8)]
    counts = Counter(session(replicas, asked(replicas, f"talk-{index}")) for index in range(4000))
    assert len(counts) == 8
    assert max(counts.values()) < 1.25 * 500
    assert min(counts.values()) > 0.75 * 500


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_replica_gets_everything(policy: str) -> None:
    [one] = replicas = [Replica(num_running=9, num_waiting=9)]
    assert POLICIES[policy](replicas, asked([one], "talk")) == 0
