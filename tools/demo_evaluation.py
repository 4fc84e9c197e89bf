"""Measures the demo model on documents whose combinations it never saw, and writes the results as Markdown."""

import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from tools.demo_batches import LONG, Packer
from tools.demo_corpus import EVALUATION_SEED, KINDS, TRAINING_SEED, Chat, Corpus, Document, chat
from tools.demo_model import ModelShape, Params, decode, load, logits
from tools.demo_tokenizer import BOS, END, ChatTemplate, token_id

DOCUMENTS_PER_KIND = 48
CHATS_PER_KIND = 64
GRAM = 8
SAMPLES: tuple[tuple[str, float], ...] = (
    ("Once upon a time", 0.7),
    ("Once upon a time", 1.0),
    ("Long ago, in a castle in the mountains, there lived a princess called Moto.", 0.7),
    ("The capital of", 0.7),
)
CHAT_SAMPLES: tuple[tuple[str, float], ...] = (
    ("Hello!", 0.7),
    ("Tell me a short story about a frog.", 0.7),
    ("What is 17 + 8?", 0.0),
    (
        "Zamira is a 31 year old painter from Oslo and has a parrot.\nExtract name, age, city, job, pet as JSON.",
        0.0,
    ),
    ("List three fruits.", 0.7),
    ("Which day comes after Friday?", 0.0),
)


class Evaluation:
    """One checkpoint and its tokenizer, asked for losses, rates and samples."""

    def __init__(self, shape: ModelShape, folder: Path) -> None:
        self._shape = shape
        self._params: Params = load(folder, shape)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end = token_id(self._tokenizer, END)
        self._template = ChatTemplate()

    def losses(self) -> Iterator[tuple[str, int, float, float]]:
        """Yields, for each kind of document, the number of predicted tokens and two losses in nats.

        The first loss is over all tokens. The second is over those that the model itself must say: all of a plain text,
        and the assistant's turns of a chat.
        """
        score = jax.jit(partial(_token_losses, self._shape))
        wanted: dict[str, list[Document]] = {kind: [] for kind in KINDS}
        for document in Corpus(EVALUATION_SEED).part(held_out=True):
            if len(wanted[document.kind]) < DOCUMENTS_PER_KIND:
                wanted[document.kind].append(document)
            elif all(len(found) == DOCUMENTS_PER_KIND for found in wanted.values()):
                break
        packer = Packer(self._tokenizer)
        for kind, documents in wanted.items():
            length = LONG if kind == "long_story" else 384
            total = said = 0.0
            count = said_count = 0
            for at in range(0, len(documents), 8):
                tokens = np.zeros((8, length + 1), np.int32)
                own = np.zeros((8, length), bool)
                real = np.zeros((8, length), bool)
                for row, document in enumerate(documents[at : at + 8]):
                    ids = self._tokenizer.encode(document.text, add_special_tokens=False).ids[: length + 1]
                    tokens[row, : len(ids)] = ids
                    real[row, : len(ids) - 1] = True
                    own[row, : len(ids) - 1] = np.asarray(packer.token_weights(ids)[1:]) == 1.0
                losses = np.asarray(score(self._params, jnp.asarray(tokens)))
                total, count = total + float(losses[real].sum()), count + int(real.sum())
                said, said_count = said + float(losses[own].sum()), said_count + int(own.sum())
            yield kind, count, total / count, said / said_count

    def answers(self, kind: str) -> list[tuple[Chat, str]]:
        """Returns greedy answers to held-out exchanges of a kind, each to the user's first turn."""
        rng = random.Random(EVALUATION_SEED)
        chats: list[Chat] = []
        while len(chats) < CHATS_PER_KIND:
            one = chat(rng, kind)
            if one.held_out:
                chats.append(one)
        prompts = [self._template.render(one.task.messages[:1], one.task.tools, prompt=True) for one in chats]
        return list(zip(chats, self.complete(prompts, 90, 0.0), strict=True))

    def complete(self, prompts: list[str], max_tokens: int, temperature: float, seed: int = 0) -> list[str]:
        """Returns the texts that follow rendered prompts."""
        ids = [self._tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        outputs = decode(self._shape, self._params, ids, max_tokens, self._end, temperature, seed)
        return [self._tokenizer.decode(output, skip_special_tokens=False) for output in outputs]

    def stories(self, count: int) -> list[str]:
        """Samples stories at temperature 0.8 after four ways to begin."""
        starts = ("Once upon a time", "Long ago,", "There once was", "It was winter")
        return [
            start + text
            for at, start in enumerate(starts)
            for text in self.complete([BOS + start] * (count // len(starts)), 220, 0.8, at)
        ]

    def samples(self) -> Iterator[tuple[str, float, str]]:
        """Yields ten prompts with their temperature and the model's text."""
        for seed, (prompt, temperature) in enumerate(SAMPLES):
            yield prompt, temperature, self.complete([BOS + prompt], 200, temperature, seed)[0]
        for seed, (prompt, temperature) in enumerate(CHAT_SAMPLES):
            rendered = self._template.render([{"role": "user", "content": prompt}], prompt=True)
            yield "user: " + prompt, temperature, self.complete([rendered], 200, temperature, seed)[0]


def _token_losses(shape: ModelShape, params: Params, tokens: jax.Array) -> jax.Array:
    scored = logits(shape, params, tokens[:, :-1], jnp.ones_like(tokens[:, :-1]))
    chosen = jnp.take_along_axis(scored, tokens[:, 1:, None], -1)[..., 0]
    return jax.nn.logsumexp(scored, -1) - chosen


def _expected(one: Chat) -> str:
    message = one.task.messages[1]
    if "tool_calls" not in message:
        return str(message["content"])
    function = message["tool_calls"][0]["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>{{"name": "{function["name"]}", "arguments": {arguments}}}</tool_call>'


def _is_json(text: str) -> bool:
    try:
        json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except ValueError:
        return False
    return True


def _rate(pairs: list[tuple[Chat, str]], right: Callable[[Chat, str], bool]) -> str:
    return f"{100 * sum(right(*pair) for pair in pairs) / len(pairs):.0f}%"


def grams(text: str) -> set[tuple[str, ...]]:
    """Returns every run of `GRAM` words."""
    words = text.split()
    return {tuple(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)}


def verbatim(texts: list[str], known: set[tuple[str, ...]]) -> float:
    """Returns the share of the word runs of `texts` that `known` contains."""
    found = [gram in known for text in texts for gram in grams(text)]
    return sum(found) / len(found)


def report(shape: ModelShape, folder: Path) -> str:
    """Returns the evaluation of a checkpoint as Markdown."""
    evaluation = Evaluation(shape, folder)
    lines = ["| held-out documents | tokens | loss, all tokens | loss, own words | perplexity, own words |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for kind, count, total, said in evaluation.losses():
        lines.append(f"| {kind} | {count} | {total:.3f} | {said:.3f} | {math.exp(said):.2f} |")
    lines += ["", f"Greedy answers to {CHATS_PER_KIND} held-out questions a kind:", ""]
    lines += ["| kind | exactly right | valid JSON |", "| --- | ---: | ---: |"]
    for kind in ("sums", "json", "tools", "facts", "lists", "story_questions"):
        pairs = evaluation.answers(kind)
        valid = _rate(pairs, lambda _, text: _is_json(text)) if kind in ("json", "tools") else ""
        lines.append(f"| {kind} | {_rate(pairs, lambda one, text: text == _expected(one))} | {valid} |")
    known: set[tuple[str, ...]] = set()
    for document in islice(Corpus(TRAINING_SEED).part(held_out=False), 20_000):
        if document.kind in ("story", "story_request"):
            known |= grams(document.text.split("<|assistant|>")[-1].removeprefix(BOS).removesuffix(END))
    new = [
        document.text.removeprefix(BOS).removesuffix(END)
        for document in islice(Corpus(EVALUATION_SEED).part(held_out=True), 600)
        if document.kind == "story"
    ]
    wrote = evaluation.stories(32)
    whole = sum(
        any(text in document.text for document in islice(Corpus(TRAINING_SEED).part(False), 5000)) for text in wrote[:8]
    )
    lines += ["", f"Runs of {GRAM} words that occur verbatim in the stories of 20,000 training documents: {verbatim(wrote, known):.0%} in "
              f"32 stories of the model, {verbatim(new, known):.0%} in {len(new)} held-out stories of the generator itself.",
              f"Whole stories copied from 5,000 training documents: {whole} of 8.", "", "## Ten samples, unedited", ""]  # fmt: skip
    for prompt, temperature, text in evaluation.samples():
        setting = "greedy" if temperature == 0 else f"temperature {temperature}"
        lines += [f"**{prompt}** ({setting})", "", "```text", text, "```", ""]
    return "\n".join(lines)
