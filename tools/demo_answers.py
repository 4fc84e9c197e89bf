"""Answers of the demo model itself, as documents: drafts for the model must guess these words, and not the corpus'.

The questions and the openings are those of the training corpus. The engine writes the rest, greedily for every third
document and at temperatures 0.7 and 1 for the others, so a seed gives the same documents again.
"""

import random
from collections.abc import Iterator
from itertools import batched
from pathlib import Path

from jaxvllm import LLM, SamplingParams
from tools.demo_corpus import Corpus, Document
from tools.demo_tokenizer import END

ASSISTANT = "<|assistant|>"
TEMPERATURES = (0.0, 0.7, 1.0)
# The engine answers so many questions at once, and it has twice as many in its queue, so it always has a full batch.
TOGETHER = 64
MAX_TOKENS = 200
# Of a document that is no chat, so many words are given.
OPENING_WORDS = (3, 24)


def answered(model: Path, seed: int) -> Iterator[Document]:
    """Yields documents of the training part without end, whose answers and continuations are the model's own.

    `model` is the directory of the demo model. A conversation goes up to its first answer.
    """
    rng = random.Random(seed)
    documents = Corpus(seed).part(held_out=False)
    with LLM(str(model), dtype="float32", max_num_seqs=TOGETHER, max_num_batched_tokens=512, speculation=False) as llm:
        for some in batched(documents, 2 * TOGETHER):
            openings = [_opening(rng, document) for document in some]
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[number % len(TEMPERATURES)],
                    seed=rng.getrandbits(31),
                    max_tokens=MAX_TOKENS,
                    skip_special_tokens=False,
                )
                for number in range(len(some))
            ]
            outputs = llm.generate(openings, params, use_tqdm=False)
            for document, opening, output in zip(some, openings, outputs, strict=True):
                [answer] = output.outputs
                end = END if answer.finish_reason == "stop" and not answer.text.endswith(END) else ""
                yield Document(document.kind, opening + answer.text + end, document.held_out)


def _opening(rng: random.Random, document: Document) -> str:
    """Returns the text up to the first answer of a chat, or the first words of another text."""
    asked, assistant, _ = document.text.partition(ASSISTANT)
    if assistant:
        return asked + assistant
    words = asked.removesuffix(END).split(" ")
    return " ".join(words[: rng.randint(*OPENING_WORDS)])
