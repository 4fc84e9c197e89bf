"""The demo model's corpus: an endless, deterministic stream of documents, split by combination.

A document is held out when the hash of what it is about (plot, place and object; the two numbers of a sum; the
person's age, city and job; ...) falls in one part of `HELD_OUT`. The training stream leaves those combinations out,
so a held-out document is never a copy of a trained one.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_facts import FACTS
from tools.demo_stories import Story, story
from tools.demo_tasks import TASKS, Message, Task
from tools.demo_tokenizer import BOS, END, ChatTemplate

HELD_OUT = 25
# The seeds of the two streams. The initial weights use the first one, too.
TRAINING_SEED, EVALUATION_SEED = 2, 1001
# The share of documents (not of tokens: a sum is a tenth of a story).
KINDS = {
    "story": 22, "long_story": 3, "story_request": 10, "story_questions": 13, "facts": 10, "sums": 14, "json": 18,
    "lists": 10, "tools": 11, "talk": 3, "plain": 5,
}  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You tell stories.",
    "You are a careful assistant. Be short.",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One document as the text to be tokenized, special tokens included."""

    kind: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Chat:
    """One exchange before rendering: the question of the evaluation, and the right answer."""

    kind: str
    task: Task
    held_out: bool


def is_held_out(key: tuple[str, ...]) -> bool:
    """Tells whether a combination belongs to the held-out part."""
    return zlib.crc32("|".join(key).encode()) % HELD_OUT == 0


def _ask_story(rng: random.Random, tale: Story) -> Task:
    wish = rng.choice((
        f"about {tale.hero.name}", f"with {tale.hero.name} in it", f"about a {tale.subject}", f"about a {tale.hero.kind}",
        f"about {tale.hero.name} and a {tale.subject}", "",
    ))  # fmt: skip
    asked = rng.choice(
        (
            "Tell me a story",
            "Tell me a short story",
            "Write a short story",
            "Please tell a story",
            "Can you tell me a story",
        )
    )
    question = f"{asked} {wish}".strip() + ("?" if asked.startswith("Can") else ".")
    return Task(({"role": "user", "content": question}, {"role": "assistant", "content": tale.text}), tale.key)


def _ask_about(rng: random.Random, tale: Story) -> Task:
    asked = rng.sample(tale.questions, rng.randint(2, 3))
    first, answer = asked[0]
    lead = rng.choice(
        (f"{tale.text}\n{first}", f"Read the story.\n{tale.text}\nQuestion: {first}", f"{first}\n{tale.text}")
    )
    messages: list[Message] = [{"role": "user", "content": lead}, {"role": "assistant", "content": answer}]
    for question, answer in asked[1:]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Task(tuple(messages), tale.key)


def chat(rng: random.Random, kind: str) -> Chat:
    """Makes one exchange of a kind."""
    if kind == "story_request":
        task = _ask_story(rng, story(rng))
    elif kind == "story_questions":
        task = _ask_about(rng, story(rng))
    else:
        task = rng.choice(TASKS[kind])(rng)
    return Chat(kind, task, is_held_out(task.key))


class Corpus:
    """The stream of documents that a seed gives."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._template = ChatTemplate()

    def documents(self) -> Iterator[Document]:
        """Yields the documents of both parts, without end."""
        kinds, weights = list(KINDS), list(KINDS.values())
        while True:
            yield self._document(self._rng.choices(kinds, weights)[0])

    def part(self, held_out: bool) -> Iterator[Document]:
        """Yields the documents of one part."""
        return (document for document in self.documents() if document.held_out == held_out)

    def _document(self, kind: str) -> Document:
        rng = self._rng
        if kind in ("story", "long_story"):
            tale = story(rng, episodes=1 if kind == "story" else rng.randint(2, 4))
            # The first episode of a long story (place, plot, main) decides whether it is held out.
            return Document(kind, f"{BOS}{tale.text}{END}", is_held_out(tale.key[:3]))
        if kind == "plain":
            sentences = [sentence for _, _, sentence in rng.sample(FACTS, rng.randint(1, 6))]
            return Document(kind, f"{BOS}{' '.join(sentences)}{END}", is_held_out(tuple(sentences[:2])))
        return self._conversation(kind)

    def _conversation(self, kind: str) -> Document:
        """Makes a document of one exchange, or of several short ones. It is held out when any of them is."""
        rng = self._rng
        chats = [chat(rng, kind)]
        if kind not in ("story_request", "story_questions", "tools"):
            short = ("facts", "sums", "json", "lists", "talk")
            follow = rng.choice((0, 0, 1, 2, 4)) + (1 if kind in ("sums", "facts") else 0)
            chats += [chat(rng, kind if rng.random() < 0.6 else rng.choice(short)) for _ in range(follow)]
        messages: list[Message] = [message for one in chats for message in one.task.messages]
        if rng.random() < 0.15:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        held_out = chats[0].held_out
        if not held_out and any(one.held_out for one in chats):
            return self._conversation(kind)
        return Document(kind, self._template.render(messages, chats[0].task.tools), held_out)
