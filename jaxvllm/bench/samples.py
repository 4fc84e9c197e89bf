"""The requests of a load: prompts and the lengths of their answers, from data sets under vLLM's names."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from jaxvllm.bench.vocabulary import Vocabulary
from jaxvllm.ranges import Count, Range, Tokens, TokensOrZero, check_ranges

TokensOrFile = Annotated[int, Range(-1, 2**31 - 1)]


@dataclass(frozen=True)
class BenchSample:
    """One request. `prompt_len` is in tokens, or None when only the server knows it."""

    prompt: str | list[int]
    prompt_len: int | None
    output_len: int

    @property
    def stranger(self) -> "BenchSample":
        """A request of the same length that begins differently, so that a trial does not fill the prefix cache."""
        return (
            BenchSample(self.prompt[::-1], self.prompt_len, self.output_len) if isinstance(self.prompt, list) else self
        )


class Dataset(Protocol):
    """A source of prompts. The same seed gives the same samples."""

    @property
    def longest(self) -> int:
        """The most tokens that a request may have, prompt and answer together, as far as the options determine it."""

    def sample(
        self, count: int, vocabulary: Vocabulary, path: Path | None, rng: np.random.Generator
    ) -> list[BenchSample]:
        """Returns `count` samples. Raises ValueError when the file or the settings cannot provide them."""


@dataclass(frozen=True)
class Random:
    """Random tokens of given lengths. Prompts share nothing but the common prefix."""

    random_input_len: TokensOrZero = 1024  # tokens of a prompt after the prefix
    random_output_len: Tokens = 128  # tokens of an answer
    random_range_ratio: Annotated[float, Range(0, 0.999)] = 0.0  # lengths vary by this share, both ways
    random_prefix_len: TokensOrZero = 0  # tokens that all prompts begin with

    PROMPT: ClassVar = ("random_input_len",)
    ANSWER: ClassVar = ("random_output_len",)

    def __post_init__(self) -> None:
        check_ranges(self)

    def sample(
        self, count: int, vocabulary: Vocabulary, path: Path | None, rng: np.random.Generator
    ) -> list[BenchSample]:
        _unneeded(path)
        inputs, outputs = self.lengths(count, rng)
        prefix = vocabulary.draw(rng, self.random_prefix_len)
        return [
            _sample(vocabulary, prefix + vocabulary.draw(rng, int(length)), int(output))
            for length, output in zip(inputs, outputs, strict=True)
        ]

    @property
    def longest(self) -> int:
        """Implements `Dataset.longest`."""
        return self.random_prefix_len + self._most(self.random_input_len) + self._most(self.random_output_len)

    def lengths(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws the tokens of `count` prompts after the prefix, and those of their answers, i64[count] each.

        Raises ValueError when a prompt would be empty.
        """
        inputs = self._lengths(self.random_input_len, count, rng)
        outputs = np.maximum(self._lengths(self.random_output_len, count, rng), 1)
        if self.random_prefix_len + inputs.min() < 1:
            raise ValueError("--random-input-len and --random-prefix-len may leave a prompt empty: give more")
        return inputs, outputs

    def _lengths(self, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
        low = math.floor(length * (1 - self.random_range_ratio))
        return rng.integers(low, self._most(length), count, endpoint=True)

    def _most(self, length: int) -> int:
        return math.ceil(length * (1 + self.random_range_ratio))


@dataclass(frozen=True)
class PrefixRepetition:
    """Prompts with a few prefixes, each shared by many prompts, which is the purpose of a prefix cache."""

    prefix_repetition_prefix_len: Tokens = 256  # tokens that the prompts of a group share
    prefix_repetition_suffix_len: Tokens = 256  # tokens that each prompt has for itself
    prefix_repetition_num_prefixes: Count = 10  # number of groups
    prefix_repetition_output_len: Tokens = 128  # tokens of an answer

    PROMPT: ClassVar = ("prefix_repetition_prefix_len", "prefix_repetition_suffix_len")
    ANSWER: ClassVar = ("prefix_repetition_output_len",)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def longest(self) -> int:
        """Implements `Dataset.longest`."""
        return sum(getattr(self, name) for name in (*self.PROMPT, *self.ANSWER))

    def sample(
        self, count: int, vocabulary: Vocabulary, path: Path | None, rng: np.random.Generator
    ) -> list[BenchSample]:
        _unneeded(path)
        num = self.prefix_repetition_num_prefixes
        if count < num:
            raise ValueError(f"--num-prompts {count} is less than --prefix-repetition-num-prefixes {num}")
        prefixes = [vocabulary.draw(rng, self.prefix_repetition_prefix_len) for _ in range(num)]
        return [
            _sample(
                vocabulary,
                prefixes[group] + vocabulary.draw(rng, self.prefix_repetition_suffix_len),
                self.prefix_repetition_output_len,
            )
            for group in rng.permutation(np.arange(count) % num)
        ]


@dataclass(frozen=True)
class ShareGpt:
    """First questions of conversations, and the lengths of their answers, from a file in the ShareGPT format."""

    sharegpt_output_len: Tokens | None = None  # tokens of an answer; None: as many as the one in the file has
    sharegpt_max_total_len: Tokens = 2048  # tokens; conversations with more, question and answer, are left out

    PROMPT: ClassVar = ("sharegpt_max_total_len",)
    ANSWER: ClassVar = ()
    # The other limits of vLLM's benchmark, in tokens: shorter conversations and longer questions are left out as well.
    LEAST: ClassVar = 4
    MOST_PROMPT: ClassVar = 1024

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def longest(self) -> int:
        """Implements `Dataset.longest`."""
        return max(self.sharegpt_max_total_len, self.LEAST + (self.sharegpt_output_len or self.LEAST))

    def sample(
        self, count: int, vocabulary: Vocabulary, path: Path | None, rng: np.random.Generator
    ) -> list[BenchSample]:
        file = _needed(path)
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
            turns = [entry["conversations"] for entry in entries if len(entry.get("conversations", ())) >= 2]
            pairs = [(str(first["value"]), str(second["value"])) for first, second, *_ in turns]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is not in the ShareGPT format: {type(error).__name__}: {error}") from None
        samples: list[BenchSample] = []
        for index in rng.permutation(len(pairs)):
            question, answer = pairs[index]
            prompt_len = vocabulary.count(question)
            output_len = self.sharegpt_output_len or vocabulary.count(answer)
            if self._fits(prompt_len, output_len):
                samples.append(BenchSample(question, prompt_len, output_len))
            if len(samples) == count:
                break
        return _enough(samples, count, file, rng)

    def _fits(self, prompt_len: int, output_len: int) -> bool:
        long_enough = prompt_len >= self.LEAST and (bool(self.sharegpt_output_len) or output_len >= self.LEAST)
        return long_enough and prompt_len <= self.MOST_PROMPT and prompt_len + output_len <= self.sharegpt_max_total_len


@dataclass(frozen=True)
class Custom:
    """Prompts from the user's file, sent unchanged: a line is a JSON object with `prompt` and maybe `output_tokens`."""

    custom_output_len: TokensOrFile = 256  # tokens of an answer; -1: the `output_tokens` of each line

    PROMPT: ClassVar = ()
    ANSWER: ClassVar = ("custom_output_len",)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.custom_output_len == 0:
            raise ValueError("--custom-output-len must be at least 1, or -1 for the `output_tokens` of lines, not 0")

    @property
    def longest(self) -> int:
        """Implements `Dataset.longest` for prompts of one token. The server refuses prompts that leave no room."""
        return max(self.custom_output_len, 1) + 1

    def sample(
        self, count: int, vocabulary: Vocabulary, path: Path | None, rng: np.random.Generator
    ) -> list[BenchSample]:
        file = _needed(path)
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        samples = [
            self._sample(lines[index], f"{file}, line {index + 1}") for index in rng.permutation(len(lines))[:count]
        ]
        return _enough(samples, count, file, rng)

    def _sample(self, line: str, where: str) -> BenchSample:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not (isinstance(entry, dict) and isinstance(entry.get("prompt"), str) and entry["prompt"]):
            raise ValueError(f'{where} must be an object with a text as "prompt"')
        output_len = entry.get("output_tokens") if self.custom_output_len == -1 else self.custom_output_len
        if not isinstance(output_len, int) or output_len < 1:
            raise ValueError(f'{where} has no "output_tokens", which --custom-output-len -1 asks for')
        return BenchSample(entry["prompt"], None, output_len)


type AnyDataset = Random | PrefixRepetition | ShareGpt | Custom

DATASETS: Mapping[str, type[Random] | type[PrefixRepetition] | type[ShareGpt] | type[Custom]] = {
    "random": Random,
    "sharegpt": ShareGpt,
    "prefix_repetition": PrefixRepetition,
    "custom": Custom,
}


def fit(dataset: AnyDataset, chosen: Collection[str], room: int) -> AnyDataset | None:
    """Returns the data set with requests of at most `room` tokens. It shrinks lengths that are not `chosen`, in
    proportion, and returns None when they cannot shrink enough.
    """
    prompt = [name for name in dataset.PROMPT if name not in chosen]
    both = [*prompt, *(name for name in dataset.ANSWER if name not in chosen)]
    # Answers keep their length as long as prompts keep a quarter of theirs, because most results are about answers.
    shares = [(prompt, share) for share in range(1000, 249, -1)] + [(both, share) for share in range(1000, 0, -1)]
    for names, share in shares:
        lengths: dict[str, Any] = {name: max(getattr(dataset, name) * share // 1000, 1) for name in names}
        shrunk = replace(dataset, **lengths)
        if shrunk.longest <= room:
            return shrunk
    return None


def _sample(vocabulary: Vocabulary, tokens: list[int], output_len: int) -> BenchSample:
    prompt = vocabulary.prompt(tokens)
    return BenchSample(prompt, len(tokens), output_len)


def _unneeded(path: Path | None) -> None:
    if path is not None:
        raise ValueError(
            f"this --dataset-name reads no file: leave out --dataset-path {path}, or name another data set"
        )


def _needed(path: Path | None) -> Path:
    if path is None:
        raise ValueError("this --dataset-name reads a file: give --dataset-path")
    return path


def _enough(samples: list[BenchSample], count: int, file: Path, rng: np.random.Generator) -> list[BenchSample]:
    """Returns `count` samples, and repeats some of them when the file has too few."""
    if not samples:
        raise ValueError(f"{file} has no prompt that fits: see docs/benchmarking.md for what is left out")
    return samples + [samples[index] for index in rng.integers(len(samples), size=count - len(samples))]
