"""The requests of the ladder: chats of many lengths after one system prompt, some of which come later."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxvllm.text.tokenizer import Tokenizer

# All chats begin with it, as those of one product do.
SYSTEM = (
    "You are a kind helper who tells stories and answers questions. Use short sentences and simple words. Say what is "
    "true, and if you do not know something, say so. Be friendly to children, and never say anything that could "
    "frighten them. A story has a beginning, a middle and an end, and at the end everyone goes home happy. An answer "
    "to a question is one sentence. A list has one thing on each line. Do not write more than you were asked for."
)
HEROES = ("a bear", "a little owl", "a young baker", "a farmer", "a fox", "Anna", "Milo", "a hedgehog")
THINGS = ("a red ball", "an old map", "a boat", "a lamp", "a silver key", "a basket", "a kite", "a bell")
QUESTIONS = ("What color is the sky?", "Who are you?", "Write a list of five animals.", "What is 3 + 4?")
# What a user pastes in front of a question: the sentences repeat, but no two texts have the same order.
SENTENCES = (
    "One morning {hero} went to the river to look for {thing}.",
    "The path was long, and the wind was cold.",
    "Near the bridge stood an old house with a green door.",
    '"Have you seen {thing}?" asked {hero}.',
    "Nobody had seen it, so they walked on through the forest.",
    "In the afternoon it began to rain, and they waited under a tree.",
    "Then a small bird called from a branch and showed them the way.",
    "Behind a stone they found {thing}, wet but whole.",
    "Everyone was happy, and they ate soup and bread together.",
    "That night {hero} slept well and dreamed of the sea.",
)
LONG_SENTENCES = 34  # of a long prompt: about 500 tokens of the embedded model
# Of 8 requests 4 want a story, 3 a short answer, and one has a long prompt.
KINDS = ("story", "question", "story", "long", "story", "question", "story", "question")
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Chat:
    """One request of the ladder. It ends when the model says so, which no engine knows before."""

    arrival: float  # seconds from the start of a run
    prompt_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class TimedChats:
    """The chats in the order of their arrival."""

    chats: tuple[Chat, ...]

    def __post_init__(self) -> None:
        if not self.chats:
            raise ValueError("a workload needs at least one request")
        arrivals = [chat.arrival for chat in self.chats]
        if arrivals != sorted(arrivals) or arrivals[0] < 0:
            raise ValueError(f"requests must be in the order of their arrival, from 0 on, not {arrivals}")

    @classmethod
    def draw(cls, tokenizer: Tokenizer, count: int, seed: int, seconds: float) -> Self:
        """Draws `count` chats. Half of them are there from the start, the others arrive evenly within `seconds`."""
        rng = np.random.default_rng(seed)
        kinds = [KINDS[index % len(KINDS)] for index in rng.permutation(count)]
        first = (count + 1) // 2
        chats = []
        for index, kind in enumerate(kinds):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _question(kind, rng)}]
            ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
            arrival = max(index + 1 - first, 0) * seconds / max(count - first, 1)
            chats.append(Chat(arrival, tuple(ids), int(rng.integers(2**31))))
        return cls(tuple(chats))

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(chat.prompt_token_ids) for chat in self.chats)


def _question(kind: str, rng: np.random.Generator) -> str:
    """Returns what a user asks."""
    hero, thing = _one_of(HEROES, rng), _one_of(THINGS, rng)
    if kind == "story":
        return f"Tell me a story about {hero} and {thing}."
    if kind == "question":
        return _one_of(QUESTIONS, rng)
    text = " ".join(_one_of(SENTENCES, rng).format(hero=hero, thing=thing) for _ in range(LONG_SENTENCES))
    return f"{text} What did {hero} look for?"


def _one_of(texts: Sequence[str], rng: np.random.Generator) -> str:
    return texts[int(rng.integers(len(texts)))]
