"""The loads of a simulation: when requests arrive, how long they are, and what they share.

Each load is a value. Iterating over its `arrivals` again gives the same requests, one after the other, so that a
million of them take no memory.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, Self

import numpy as np

from jaxvllm.bench.samples import PrefixRepetition, Random
from jaxvllm.bench.traffic import Traffic
from jaxvllm.ranges import Range, Tokens, TokensOrZero, check_ranges
from jaxvllm.simulator.arrival import Arrival, Segment

Seconds = Annotated[float, Range(0, 1e6)]
Turns = Annotated[int, Range(1, 10_000)]


class Workload(Protocol):
    """A source of requests."""

    @property
    def traffic(self) -> Traffic:
        """The number of requests, and how often one arrives."""

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the requests in the order of their arrival, the first at the earliest at second 0."""

    def at_rate(self, rate: float, count: int) -> "Workload":
        """Returns a load of the same kind with `count` requests, of which `rate` arrive in a second."""


@dataclass(frozen=True)
class RandomWorkload:
    """Prompts that share nothing but the common prefix of `data`, with the lengths of `bench serve`."""

    traffic: Traffic
    data: Random
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        times, rng = _times(self.traffic, self.seed)
        names = itertools.count(1)
        prefix = Segment(0, self.data.random_prefix_len)
        shared = (prefix,) if prefix.num_tokens else ()
        lengths = self.data.lengths(len(times), rng)
        for at, num_prompt, num_answer in zip(times, *(one.tolist() for one in lengths), strict=True):
            prompt = (*shared, Segment(next(names), num_prompt)) if num_prompt else shared
            yield Arrival(at, prompt, Segment(next(names), num_answer))

    def at_rate(self, rate: float, count: int) -> Self:
        return replace(self, traffic=replace(self.traffic, request_rate=rate, num_prompts=count))


@dataclass(frozen=True)
class PrefixWorkload:
    """Prompts after a few system prompts, each of which many requests share. Every request draws one of them."""

    traffic: Traffic
    data: PrefixRepetition
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        times, rng = _times(self.traffic, self.seed)
        data, num_prefixes = self.data, self.data.prefix_repetition_num_prefixes
        names = itertools.count(num_prefixes)
        for at, prefix in zip(times, rng.integers(num_prefixes, size=len(times)).tolist(), strict=True):
            prompt = (
                Segment(prefix, data.prefix_repetition_prefix_len),
                Segment(next(names), data.prefix_repetition_suffix_len),
            )
            yield Arrival(at, prompt, Segment(next(names), data.prefix_repetition_output_len))

    def at_rate(self, rate: float, count: int) -> Self:
        return replace(self, traffic=replace(self.traffic, request_rate=rate, num_prompts=count))


@dataclass(frozen=True)
class Conversations:
    """Conversations of several turns. Each prompt is all that was said before, and a new question."""

    turns: Turns = 4  # questions of a conversation
    turn_seconds: Seconds = 30.0  # time between two questions of a conversation; the second waits for no answer
    system_len: TokensOrZero = 256  # tokens that all conversations begin with
    question_len: Tokens = 64  # tokens of a question
    answer_len: Tokens = 128  # tokens of an answer

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ConversationWorkload:
    """Conversations that begin at random. `traffic` counts requests, which are questions, and not conversations."""

    traffic: Traffic
    data: Conversations
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        data = self.data
        num_talks = -(-self.traffic.num_prompts // data.turns)
        of_talks = replace(self.traffic, num_prompts=num_talks, request_rate=self.traffic.request_rate / data.turns)
        starts, _ = _times(of_talks, self.seed)
        times = np.array(starts)[:, None] + data.turn_seconds * np.arange(data.turns)
        system = (Segment(0, data.system_len),) if data.system_len else ()
        for place in np.argsort(times, axis=None, kind="stable")[: self.traffic.num_prompts].tolist():
            talk, turn = divmod(place, data.turns)
            first = 1 + 2 * talk * data.turns  # the names of a conversation: question, answer, question, ...
            said = [
                Segment(first + index, data.answer_len if index % 2 else data.question_len)
                for index in range(2 * turn + 2)
            ]
            yield Arrival(float(times[talk, turn]), (*system, *said[:-1]), said[-1])

    def at_rate(self, rate: float, count: int) -> Self:
        return replace(self, traffic=replace(self.traffic, request_rate=rate, num_prompts=count))


def _times(traffic: Traffic, seed: int) -> tuple[list[float], np.random.Generator]:
    """Returns the seconds of all arrivals, and a generator for the rest. `bench serve` draws the same seconds."""
    if traffic.max_concurrency is not None:
        raise ValueError("a simulated load is open: its clients wait for nobody, so leave out --max-concurrency")
    samples_rng, arrivals_rng = np.random.default_rng(seed).spawn(2)
    return traffic.arrivals(arrivals_rng), samples_rng
