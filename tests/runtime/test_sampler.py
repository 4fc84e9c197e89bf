"""The sampler against NumPy: what is kept by sorting, what is drawn from the documented noise, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxvllm.core.request import MAX_BAD_WORD_TOKENS
from jaxvllm.core.sampling_params import MAX_LOGIT_BIASES, MAX_LOGPROBS
from jaxvllm.core.slots import MAX_STOP_IDS, NO_TOKEN
from jaxvllm.runtime.logit_rules import VocabShare, run_rules
from jaxvllm.runtime.sampler import LOGIT_RULES, DeviceLogprobs, SamplerOptions, logprobs, sample
from jaxvllm.runtime.slot_fields import Rows

pytestmark = pytest.mark.usefixtures("quick_programs")


@jax.jit
def jitted_sample(logits: jax.Array, params: Rows, positions: jax.Array) -> jax.Array:
    return sample(logits, params, positions, logits.shape[-1])


@jax.jit
def jitted_logprobs(logits: jax.Array, token_ids: jax.Array, params: Rows) -> DeviceLogprobs:
    return logprobs(logits, token_ids, params, jnp.zeros(len(logits), jnp.int32), logits.shape[-1])


ROWS, VOCAB = 6, 40
MANY = 512  # rows of one call, where it takes many to see what may come and how often
# Sums of probabilities within this of top_p, and logits of min_p's floor, may fall on either side.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Row:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: tuple[int, int] = (5, 6)
    min_length: int = 0
    stop_ids: tuple[int, ...] = ()
    num_logprobs: int = -1
    logit_divisor: float = 1.0
    allowed: tuple[int, ...] | None = None  # by the host's mask
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def is_penalized(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def __str__(self) -> str:
        changed = (f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default)
        return ",".join(changed) or "plain"


def state_of(rows: list[Row]) -> Rows:
    """The slot fields of `rows`. Large ones that a row does not ask for have what a former tenant might have left."""

    def flags(asks: list[bool]) -> np.ndarray:
        return np.asarray(asks, np.int32)

    def padded(values: Sequence[Any], size: int, default: int = NO_TOKEN) -> np.ndarray:
        return np.asarray([*values, *[default] * (size - len(values))], np.int32)

    def scalars(name: str, dtype: Any) -> np.ndarray:
        return np.asarray([getattr(row, name) for row in rows], dtype)

    left = bits(tuple(range(1, 64, 2)))
    values = {
        "temperature": scalars("temperature", np.float32),
        "top_k": scalars("top_k", np.int32),
        "top_p": scalars("top_p", np.float32),
        "min_p": scalars("min_p", np.float32),
        "seed": scalars("seed", np.uint32),
        "min_length": scalars("min_length", np.int32),
        "late_ids": np.stack([padded(row.stop_ids, MAX_STOP_IDS) for row in rows]),
        "num_logprobs": scalars("num_logprobs", np.int32),
        "logit_divisor": scalars("logit_divisor", np.float32),
        "is_masked": flags([row.allowed is not None for row in rows]),
        "mask": np.stack([left if row.allowed is None else bits(row.allowed) for row in rows]),
        "is_restricted": flags([row.allowed_token_ids is not None for row in rows]),
        "allowed": np.stack([left if row.allowed_token_ids is None else bits(row.allowed_token_ids) for row in rows]),
        "is_biased": flags([bool(row.logit_bias) for row in rows]),
        "biases": np.stack([packed_biases(row.logit_bias or ((1, 7.0),)) for row in rows]),
        "repetition_penalty": scalars("repetition_penalty", np.float32),
        "frequency_penalty": scalars("frequency_penalty", np.float32),
        "presence_penalty": scalars("presence_penalty", np.float32),
        "prompt_tokens": np.stack([bits(row.prompt) if row.is_penalized else left for row in rows]),
        "output_counts": np.stack(
            [np.bincount(np.asarray(row.output if row.is_penalized else (1, 3), int), minlength=64) for row in rows]
        ).astype(np.int16),
        "has_bad_words": flags([bool(row.bad_words) for row in rows]),
        "bad_words": np.stack([packed_bad_words(row.bad_words or ((1,),)) for row in rows]),
        "num_prompt": np.asarray([len(row.prompt) for row in rows], np.int32),
        "history": np.stack([padded((*row.prompt, *row.output), 64, 0) for row in rows]),
    }
    return Rows(jax.tree.map(jnp.asarray, values), jnp.arange(len(rows)))


def packed_biases(pairs: tuple[tuple[int, float], ...]) -> np.ndarray:
    """i32[2, MAX_LOGIT_BIASES]: the tokens, and the bits of their biases."""
    packed = np.full((2, MAX_LOGIT_BIASES), NO_TOKEN, np.int32)
    packed[0, : len(pairs)] = [token for token, _ in pairs]
    packed[1, : len(pairs)] = np.asarray([bias for _, bias in pairs], np.float32).view(np.int32)
    return packed


def packed_bad_words(words: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """i32[3, MAX_BAD_WORD_TOKENS]: all tokens, and where each one's word begins and ends."""
    packed = np.full((3, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    first = 0
    for word in words:
        packed[:, first : first + len(word)] = np.stack(
            [word, np.full(len(word), first), np.full(len(word), first + len(word) - 1)]
        )
        first += len(word)
    return packed


def bits(token_ids: tuple[int, ...]) -> np.ndarray:
    """A mask of 64 tokens that allows `token_ids`."""
    allowed = np.isin(np.arange(64), token_ids)
    return np.packbits(allowed, bitorder="little").view(np.int32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max())
    return weights / weights.sum()


def processed(logits: np.ndarray, row: Row) -> np.ndarray:
    """f32[V]: what the documented operations, one after the other, make of the logits of a row."""
    x = logits.astype(np.float32)
    tokens = np.arange(len(x))
    if row.allowed is not None:
        x = np.where(np.isin(tokens, row.allowed), x, -np.inf)
    if row.allowed_token_ids is not None:
        x = np.where(np.isin(tokens, row.allowed_token_ids), x, -np.inf)
    for token, bias in row.logit_bias:
        x[token] += np.float32(bias)
    if row.position < row.min_length:
        without = np.where(np.isin(tokens, row.stop_ids), -np.inf, x)
        if (without > -np.inf).any():
            x = without
    counts = np.bincount(np.asarray(row.output, int), minlength=len(x))
    r = np.float32(row.repetition_penalty)
    x = np.where((counts > 0) | np.isin(tokens, row.prompt), np.where(x > 0, x / r, x * r), x)
    x = x - np.float32(row.frequency_penalty) * counts.astype(np.float32)
    x = x - np.float32(row.presence_penalty) * (counts > 0)
    for *begins, last in row.bad_words:
        if not begins or list(row.output[-len(begins) :]) == begins:
            x[last] = -np.inf
    return x


def kept(scaled: np.ndarray, row: Row) -> tuple[np.ndarray, bool]:
    """bool[V] of what min_p, then top_k, then top_p leave of f32[V], by sorting; and whether rounding decides."""
    scaled = scaled.astype(np.float64)
    unclear = False
    if row.min_p > 0:
        floor = scaled.max() + np.log(np.float64(np.float32(row.min_p)))
        unclear |= bool(np.any((np.abs(scaled - floor) < ROUNDING) & (scaled != floor)))
        scaled = np.where(scaled >= floor, scaled, -np.inf)
    if 0 < row.top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-row.top_k], scaled, -np.inf)
    if row.top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        sums = np.cumsum(softmax(scaled)[order])
        unclear |= bool(np.any(np.abs(sums - np.float32(row.top_p)) < ROUNDING))
        last = min(int(np.searchsorted(sums, np.float32(row.top_p))), len(sums) - 1)
        scaled = np.where(scaled >= scaled[order[last]], scaled, -np.inf)
    return scaled > -np.inf, unclear


@jax.jit
@jax.vmap
def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
    """f32[VOCAB]: what DESIGN promises, counter based on the request's seed and the token's position."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (VOCAB,), jnp.float32)


parameter_rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.3, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.3, 1.0]),
    seed=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
)


@settings(max_examples=150)
@given(
    rows=st.lists(parameter_rows, min_size=ROWS, max_size=ROWS),
    logits_seed=st.integers(0, 2**32),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    forbidden=st.integers(0, VOCAB - 1),
)
@example(rows=[Row(top_p=0.5)] * ROWS, logits_seed=0, step=2.0, forbidden=0)
@example(rows=[Row(top_k=3), Row(temperature=0.0)] * (ROWS // 2), logits_seed=1, step=0.5, forbidden=38)
def test_draws_what_the_oracle_draws(rows: list[Row], logits_seed: int, step: float, forbidden: int) -> None:
    rng = np.random.default_rng(logits_seed)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    if step:  # many ties, zeros of both signs among them
        logits = (np.round(logits / step) * step).astype(np.float32)
    for row in logits:
        row[rng.permutation(VOCAB)[:forbidden]] = -np.inf
    positions = rng.integers(0, 5000, ROWS).astype(np.int32)
    params = state_of(rows)
    tokens = np.asarray(jitted_sample(logits, params, positions))
    assert tokens.dtype == np.int32
    gumbel = np.asarray(noise(params["seed"], positions))
    for index, row in enumerate(rows):
        if row.temperature == 0:
            assert tokens[index] == np.argmax(logits[index])
            continue
        scaled = logits[index] / np.float32(row.temperature)
        keep, unclear = kept(scaled, row)
        if not unclear:
            assert tokens[index] == np.argmax(np.where(keep, scaled + gumbel[index], -np.inf)), row


tokens_of_vocab = st.integers(0, VOCAB - 1)


biases = st.dictionaries(tokens_of_vocab, st.sampled_from([-100.0, -1.5, 0.3, 9.0]))


@st.composite
def rows_with_everything(draw: st.DrawFn) -> Row:
    few = st.lists(tokens_of_vocab, min_size=1, max_size=6, unique=True).map(tuple)
    small = st.integers(0, 3)  # so that outputs repeat themselves, and bad words meet them
    output = tuple(draw(st.lists(small | tokens_of_vocab, max_size=12)))
    words = st.lists(st.lists(small, min_size=1, max_size=3).map(tuple), max_size=20).map(tuple)
    return replace(
        draw(parameter_rows),
        allowed=draw(st.none() | few),
        allowed_token_ids=draw(st.none() | st.lists(tokens_of_vocab, min_size=20, unique=True).map(tuple)),
        logit_bias=tuple(
            sorted(draw(st.dictionaries(tokens_of_vocab, st.sampled_from([-100.0, -1.5, 0.3, 9.0]))).items())
        ),
        min_length=draw(st.integers(0, 30)),
        stop_ids=draw(few | st.just(())),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 1e6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0])),
        bad_words=draw(words),
        prompt=tuple(draw(st.lists(small | tokens_of_vocab, min_size=1, max_size=12))),
        output=output,
    )


@jax.jit
def jitted_logit_rules(logits: jax.Array, rows: Rows, positions: jax.Array) -> jax.Array:
    return run_rules(LOGIT_RULES, logits, rows, positions, VocabShare(VOCAB, VOCAB))


@settings(max_examples=60)
@given(
    rows=st.lists(rows_with_everything() | parameter_rows, min_size=ROWS, max_size=ROWS),
    logits_seed=st.integers(0, 2**32),
)
def test_everything_together_is_what_the_oracle_does(rows: list[Row], logits_seed: int) -> None:
    logits = np.random.default_rng(logits_seed).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    positions = np.asarray([row.position for row in rows], np.int32)
    params = state_of(rows)
    expected = np.stack([processed(one, row) for one, row in zip(logits, rows, strict=True)])
    got = np.asarray(jitted_logit_rules(logits, params, positions))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    tokens = np.asarray(jitted_sample(logits, params, positions))
    gumbel = np.asarray(noise(params["seed"], positions))
    for index, row in enumerate(rows):
        keep, unclear = np.ones(VOCAB, bool), False
        scores = got[index]
        if row.temperature > 0 and (scores > -np.inf).any():  # where nothing is possible, the first token comes
            scaled = got[index] / np.float32(row.temperature)
            keep, unclear = kept(scaled, row)
            scores = scaled + gumbel[index]
        if not unclear:
            assert tokens[index] == np.argmax(np.where(keep, scores, -np.inf)), row


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row(), {0, 1, 2, 3, 4, 5}),
        (Row(top_k=1), {0}),
        (Row(top_k=2), {0, 1, 2}),  # 1 and 2 are equal: both stay
        (Row(top_k=4), {0, 1, 2, 3}),
        (Row(top_k=100), {0, 1, 2, 3, 4, 5}),
        (Row(top_p=1e-9), {0}),
        (Row(top_p=0.39), {0}),
        (Row(top_p=0.41), {0, 1, 2}),
        (Row(top_p=0.79), {0, 1, 2}),
        (Row(top_p=0.81), {0, 1, 2, 3}),
        (Row(min_p=0.6), {0}),
        (Row(min_p=0.4), {0, 1, 2}),
        (Row(min_p=1.0), {0}),
        (Row(top_k=3, top_p=0.49), {0}),  # of what top_k left: 0.4 of 0.8
        (Row(min_p=0.2, top_p=0.9), {0, 1, 2, 3}),  # of what min_p left: 0.9 would need all four
        (Row(temperature=0.0), {0}),
        (Row(allowed=(1, 3)), {1, 3}),
        (Row(allowed=(1, 3, 40), top_k=1), {1}),
        (Row(allowed=(4,), temperature=0.0), {4}),
    ],
    ids=str,
)
def test_which_tokens_can_come(row: Row, expected: set[int]) -> None:
    # Tokens 6 and 7 are impossible whatever is asked.
    logits = np.log(np.asarray([0.4, 0.2, 0.2, 0.1, 0.06, 0.04, 0.0, 0.0], np.float32), where=np.arange(8) < 6,
                    out=np.full(8, -np.inf, np.float32))  # fmt: skip
    tokens = jitted_sample(np.tile(logits, (MANY, 1)), state_of([row] * MANY), np.arange(MANY, dtype=np.int32))
    assert set(np.asarray(tokens).tolist()) == expected


def test_frequencies_are_the_probabilities() -> None:
    count, temperature = 4096, 1.7
    logits = np.asarray([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, -9.0], np.float32)
    rows = [Row(temperature=temperature, top_k=7)] * count
    expected = count * softmax(np.where(np.arange(8) < 7, logits / temperature, -np.inf))

    def drawn(rows: list[Row], positions: np.ndarray) -> np.ndarray:
        parts = [slice(first, first + MANY) for first in range(0, count, MANY)]
        run = np.tile(logits, (MANY, 1))
        return np.concatenate([jitted_sample(run, state_of(rows[part]), positions[part]) for part in parts])

    over_positions = drawn(rows, np.arange(count, dtype=np.int32))
    seeds = [Row(temperature=temperature, top_k=7, seed=(number, 0)) for number in range(count)]
    over_seeds = drawn(seeds, np.zeros(count, np.int32))
    for tokens in (over_positions, over_seeds):
        counts = np.bincount(tokens, minlength=8)
        assert counts[7] == 0
        chi_square = ((counts - expected)[:7] ** 2 / expected[:7]).sum()
        assert chi_square < 22.5  # 6 degrees of freedom: 0.1 % lie beyond
    # One token says nothing about the next: of 49 pairs, 36 degrees of freedom.
    pairs = np.bincount(over_positions[:-1] * 7 + over_positions[1:], minlength=49).reshape(7, 7)
    product = np.outer(pairs.sum(1), pairs.sum(0)) / pairs.sum()
    assert ((pairs - product) ** 2 / product).sum() < 68


def test_a_seeded_row_draws_the_same_whatever_it_is_batched_with() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, VOCAB)).astype(np.float32)
    mine = Row(temperature=0.9, top_p=0.95, seed=(11, 12))
    company = [Row(temperature=0.0), Row(top_k=3, seed=(1, 1)), Row(min_p=0.1, seed=(2, 2)), Row(seed=(3, 3))]

    def tokens(place: int) -> list[int]:
        rows = [company[(index + place) % 4] for index in range(ROWS)]
        rows[place] = mine
        drawn = []
        for position, row_logits in enumerate(logits):
            batch = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
            batch[place] = row_logits
            positions = rng.integers(0, 999, ROWS).astype(np.int32)
            positions[place] = position
            drawn.append(int(jitted_sample(batch, state_of(rows), positions)[place]))
        return drawn

    first = tokens(0)
    assert len(set(first)) > 5
    # How many rows there are changes nothing either: test_sharded_sampler has one row alone and among others.
    assert first == tokens(0) == tokens(2) == tokens(ROWS - 1)


def test_a_plain_sampler_draws_the_same_where_no_row_has_rules() -> None:
    rows = state_of([Row(temperature=0), *(Row(temperature=0.3 + 0.4 * i, seed=(i, 7)) for i in range(ROWS - 1))])
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32) * 3
    positions = jnp.arange(ROWS)
    plain = jax.jit(lambda *given: sample(*given, VOCAB, options=SamplerOptions(is_plain=True)))
    np.testing.assert_array_equal(plain(logits, rows, positions), jitted_sample(logits, rows, positions))


def test_stop_ids_wait_for_min_tokens() -> None:
    logits = np.zeros((5, 8), np.float32)
    logits[:, 3], logits[:, 5] = 9, 8
    stops = (3, 5, 1000)  # an id beyond the vocabulary forbids nothing
    rows = [
        Row(temperature=0.0, stop_ids=stops, min_length=10),
        Row(temperature=0.0, stop_ids=stops, min_length=9),
        Row(temperature=0.0, stop_ids=(), min_length=10),
        Row(temperature=0.01, stop_ids=(3,), min_length=10),
        Row(temperature=0.0, stop_ids=stops, min_length=0),
    ]
    tokens = jitted_sample(logits, state_of(rows), np.full(5, 9, np.int32))
    # The position that the token will have, 9, is below 10 and not below 9.
    assert np.asarray(tokens).tolist() == [0, 3, 3, 5, 3]


def test_equal_zeros_of_both_signs_are_a_tie() -> None:
    logits = np.full((256, 4), -5, np.float32)
    logits[:, 0], logits[:, 1] = 0.0, -0.0
    for row in (Row(top_k=1), Row(top_p=0.3)):
        tokens = jitted_sample(logits, state_of([row] * 256), np.arange(256, dtype=np.int32))
        assert set(np.asarray(tokens).tolist()) == {0, 1}


@pytest.mark.parametrize("vocab", [7, 50])
def test_logprobs_are_those_of_the_unmodified_distribution(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 2, (4, vocab)).astype(np.float32)
    logits[1, :3] = -np.inf
    logits[2, :4] = 1.5  # ties
    tokens = np.asarray([0, 4, 1, vocab - 1], np.int32)
    rows = [Row(temperature=0.0), Row(top_k=1, num_logprobs=5), Row(min_length=99, stop_ids=(1,)), Row(top_p=0.1)]
    got: Any = jax.tree.map(np.asarray, jitted_logprobs(logits, tokens, state_of(rows)))
    count = min(MAX_LOGPROBS, vocab)
    assert got.top.shape == got.top_ids.shape == (4, count)
    for index, row_logits in enumerate(logits):
        with np.errstate(divide="ignore"):
            expected = np.log(softmax(row_logits))
        np.testing.assert_allclose(got.token[index], expected[tokens[index]], rtol=1e-5)
        np.testing.assert_allclose(got.top[index], np.sort(expected)[::-1][:count], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.top[index], expected[got.top_ids[index]], rtol=1e-5, atol=1e-6)
        assert len(set(got.top_ids[index].tolist())) == count
        assert got.ranks[index] == (row_logits >= row_logits[tokens[index]]).sum()


def test_a_beam_search_has_a_temperature_in_its_logprobs() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (3, 30)).astype(np.float32)
    rows = [Row(num_logprobs=5), Row(num_logprobs=5, logit_divisor=0.5), Row(temperature=3.0, logit_divisor=7.0)]
    got: Any = jax.tree.map(np.asarray, jitted_logprobs(logits, np.zeros(3, np.int32), state_of(rows)))
    for index, row in enumerate(rows):
        expected = np.log(softmax(logits[index] / np.float32(row.logit_divisor)))
        np.testing.assert_allclose(got.token[index], expected[0], rtol=1e-5)


def test_no_logprobs_unless_a_row_wants_them() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 30)).astype(np.float32)
    got = jitted_logprobs(logits, np.zeros(3, np.int32), state_of([Row()] * 3))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(got))
    wanted = jitted_logprobs(logits, np.zeros(3, np.int32), state_of([Row(), Row(num_logprobs=0), Row()]))
    assert np.asarray(wanted.token).all()
