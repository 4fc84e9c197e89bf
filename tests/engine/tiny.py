"""A tiny random Llama that speaks text, engines over it, and a naive recomputation to compare them with."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import LLM, RequestOutput, SamplingParams
from jaxvllm.core.page_pool import Pages
from jaxvllm.engine.draft_pace import DraftPace
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.runtime.buckets import Bucket, BucketLadder
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture
from tests.run_cache import run_cache
from tests.text.small_tokenizers import TEMPLATE, byte_level_backend, save

MAX_MODEL_LEN = 128
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def write_tiny_checkpoint(directory: Path, fixture: str | Fixture = "llama", **generation_config: Any) -> Path:
    """A fixture with a byte-level tokenizer: <s> is its BOS, <|end|> its EOS."""
    backend = byte_level_backend()
    vocab_size = backend.get_vocab_size()
    small = Fixture.load(fixture) if isinstance(fixture, str) else fixture
    shapes = {
        name: [vocab_size, *shape[1:]] if shape[0] == small.config["vocab_size"] else shape
        for name, shape in small.shapes.items()
    }
    replace(small, config=small.config | {"vocab_size": vocab_size}, shapes=shapes).write_checkpoint(directory)
    save(backend, directory, bos_token="<s>", eos_token="<|end|>", chat_template=TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def tiny_llm(directory: Path | str, **options: Any) -> LLM:
    """An LLM of two programs: 8 running requests, 16 tokens a step, 64 pages; `options` change what they name."""
    small = dict(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        row_buckets=(8,),
        token_buckets=(16,),
        num_pages=65,
        max_decode_burst=8,
        compilation_cache=run_cache(),
        warm_up="full",
    )
    return LLM(model=str(directory), **small | options)


def choose_drafts(monkeypatch: pytest.MonkeyPatch, choose: Callable[[Collection[int]], int] = max) -> None:
    """Lets `choose` say how many drafts rows may have, of the possible numbers: no clock of this machine decides it."""
    monkeypatch.setattr(DraftPace, "choose", lambda self, num_rows, most: choose(most))
    monkeypatch.setattr(DraftPace, "may_be_blind", lambda self, num_rows: False)


@contextmanager
def all_drafts_or_none(divides: bool = False, bursts: bool = True) -> Iterator[None]:
    """Engines that start within have decode steps in which every row has all of its drafts, and steps without any.

    The programs that divide drafts among rows, and those that a proposer does not see, are not compiled: each takes
    five seconds, and no step that `choose_drafts` leaves to `max` runs in one. With `divides` there are the former.
    Without `bursts` there is no program for decoding without drafts: the few steps of that kind run in a larger one.
    """
    build = BucketLadder.build

    def with_fewer(*counts: Any, **options: Any) -> BucketLadder:
        ladder = build(*counts, **options)
        kept = tuple(bucket for bucket in ladder.drafted if divides or bucket.num_drafts == ladder.drafts.num_drafts)
        buckets = tuple(bucket for bucket in ladder.buckets if bursts or not bucket.is_decode)
        fewer = replace(ladder, buckets=buckets)
        vars(fewer).update(drafted=kept, split=ladder.split, blind=())  # each is worked out once
        return fewer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketLadder, "build", with_fewer)
        yield


@contextmanager
def one_program(num_tokens: int = 16, num_rows: int = 8) -> Iterator[None]:
    """Engines that start within have the bucket that holds every plan of so many rows, and no other.

    Each of its steps decodes one token: there is no program of bursts, which takes one to two seconds of the CPU.
    """

    def with_one(*counts: Any, has_lora: bool = False, **options: Any) -> BucketLadder:
        return BucketLadder((Bucket(num_tokens, num_rows, is_adapted=has_lora),))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketLadder, "build", with_one)
        yield


@contextmanager
def few_pages(llm: LLM, count: int, number: int = 0) -> Iterator[Pages]:
    """Leaves group `number` of layers `count` pages, none with a cached prefix: the test holds the others."""
    cache = llm.engine.replicas[0].scheduler.cache
    cache.reset_prefix_cache()
    group = cache.groups[number]
    held = group.pool.allocate(group.pool.num_available - count)
    group.usable -= len(held)
    try:
        yield held
    finally:
        group.pool.release(held)
        group.usable += len(held)


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or is remembered, and every page is free."""
    engine = llm.engine
    assert not engine.has_work
    assert engine.outputs.num_requests == 0
    for replica in engine.replicas:
        replica.scheduler.check_invariants()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_owned) == (0, 0, 0)


def greedy_tokens(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = 24) -> list[list[int]]:
    """The greedy tokens after each prompt, all prompts in one call."""
    outputs = llm.generate([list(p) for p in prompts], replace(GREEDY, max_tokens=max_tokens), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def merged_tokens(
    checkpoint: Path, weights: Sequence[Any], prompts: Sequence[Sequence[int]], who: Sequence[int]
) -> list[list[int]]:
    """The greedy tokens of each prompt with the weights whose number `who` says, in an engine without adapters."""
    found = {}
    with one_program(), tiny_llm(checkpoint) as llm:
        for number in sorted(set(who)):
            llm.update_weights(weights[number])
            own = [prompt for prompt, of in zip(prompts, who, strict=True) if of == number]
            found[number] = iter(greedy_tokens(llm, own))
    return [next(found[number]) for number in who]


class Recomputation:
    """The model without pages, batches and caches: every call computes the whole sequence by dense attention."""

    def __init__(self, directory: Path) -> None:
        self._config = checkpoint.read_config(directory)
        self._spec = model_spec(self._config, MAX_MODEL_LEN)
        self._logits = jax.jit(lambda params, tokens: dense_logits(params, self._spec, tokens))
        self.take(directory)

    def take(self, directory: Path) -> None:
        """Computes with other weights of the same model from now on."""
        options: Any = dict(dtype=jnp.float32, layout="separate", hf_config=self._config)
        self._params = checkpoint.load(directory, self._spec, **options)

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """f32[len(output), V]: the logits that each token of `output` was chosen from."""
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        tokens = [*prompt, *output]
        padded[: len(tokens)] = tokens
        return np.asarray(self._logits(self._params, padded))[len(prompt) - 1 :][: len(output)]

    def is_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether each token of `output` is the best one after those before it."""
        return self.logits(prompt, output).argmax(-1).tolist() == list(output)


def greedy_by(
    logits: Callable[[np.ndarray], Any], prompts: Sequence[Sequence[int]], count: int, room: int
) -> list[list[int]]:
    """What each prompt goes on with, `count` tokens, by the logits [room, V] of a text that is filled up to `room`."""
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            padded = np.zeros(room, np.int32)
            padded[: len(tokens)] = tokens
            tokens.append(int(np.asarray(logits(padded))[len(tokens) - 1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def random_prompts(count: int, longest: int, seed: int, vocab_size: int = 256) -> list[list[int]]:
    """Prompts of random tokens, 1 to `longest` of them. Ids below 2 are special."""
    random = np.random.default_rng(seed)
    return [random.integers(2, vocab_size, random.integers(1, longest + 1)).tolist() for _ in range(count)]


def assert_scores(llm: LLM, recomputation: Recomputation, output: RequestOutput, count: int, near: float = 0.0) -> None:
    """Asserts that the tokens of the prompt have the `count` best log-probabilities of the model, and -1 means all.

    Two tokens that are as `near` as that to each other may come in either order.
    """
    prompt, scores = output.prompt_token_ids, output.prompt_logprobs
    assert scores is not None and len(scores) == len(prompt) and scores[0] is None
    logits = recomputation.logits(prompt[:1], prompt[1:]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for token_id, row, given in zip(prompt[1:], expected, scores[1:], strict=True):
        assert given is not None and next(iter(given)) == token_id
        most = len(row) if count == -1 else count
        ranks = {one: logprob.rank or 0 for one, logprob in given.items()}
        assert sorted(ranks.values()) == sorted({*range(1, most + 1), ranks[token_id]})
        told = np.array([logprob.logprob for logprob in given.values()])
        values, places = row[list(given)], np.array(list(ranks.values()))
        np.testing.assert_allclose(told, values, atol=1e-4)
        assert ((row > values[:, None] + near).sum(1) < places).all()
        assert (places <= (row >= values[:, None] - near).sum(1)).all()
        text_of = llm.get_tokenizer().token_text
        assert all(logprob.decoded_token == text_of(one) for one, logprob in given.items())
