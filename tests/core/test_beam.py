"""The search alone: survivors, scores and the end, against definitions that compute all of it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.beam import Beam, BeamSearch, BeamSearchParams, Candidates
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import SamplingParams
from tests.core.beam_oracle import Found, Model, beam_search, exhaustive_search

EOS = 0


def model_of(seed: int, vocab_size: int) -> Model:
    """Random distributions, some of them sharp."""

    @cache
    def values(tokens: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, *tokens])
        logits = rng.normal(size=vocab_size) * rng.choice([0.3, 1, 4])
        return np.asarray(logits - np.log(np.exp(logits).sum()), np.float32)

    return lambda tokens: values(tuple(tokens))


def run(model: Model, prompt: Sequence[int], params: BeamSearchParams) -> tuple[list[Found], int]:
    """What a search finds that always proposes all tokens, and after how many steps."""
    search = BeamSearch(params, len(prompt), len(prompt) + params.max_tokens, (EOS,))
    steps = 0
    while not search.is_over:
        proposed = []
        for beam in search.beams:
            values = model([*prompt, *(one.token_id for one in beam.path())])
            order = np.argsort(-values, kind="stable").astype(np.int32)
            proposed.append(Candidates(order, values[order]))
        before = search.beams
        survivors = search.advance(proposed)
        steps += 1
        assert [beam.parent for beam in search.beams] == [before[one.parent] for one in survivors]
        assert [beam.token_id for beam in search.beams] == [one.token_id for one in survivors]
    return [
        Found(tuple(one.token_id for one in beam.path()), beam.cumulative_logprob, search.score(beam))
        for beam in search.best()
    ], steps


@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    vocab_size=st.integers(1, 7),
    params=st.builds(
        BeamSearchParams,
        beam_width=st.integers(1, 5),
        max_tokens=st.integers(1, 6),
        ignore_eos=st.booleans(),
        length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
        early_stopping=st.booleans(),
    ),
)
def test_it_finds_what_a_plain_beam_search_finds(
    seed: int, prompt: list[int], vocab_size: int, params: BeamSearchParams
) -> None:
    model = model_of(seed, vocab_size)
    expected = beam_search(
        model,
        prompt,
        params.beam_width,
        params.max_tokens,
        EOS,
        params.length_penalty,
        params.ignore_eos,
        params.early_stopping is True,
    )
    assert run(model, prompt, params)[0] == expected


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_wide_beams_find_the_best_of_all(seed: int, penalty: float) -> None:
    model = model_of(seed, 3)
    params = BeamSearchParams(9, 3, length_penalty=penalty)  # no more than 9 sequences of two tokens: none is pruned
    found = run(model, [1, 2], params)[0]
    best = exhaustive_search(model, [1, 2], 9, 3, EOS, 3, penalty)
    assert [one.output for one in found] == [one.output for one in best]


def test_it_ends_when_nothing_can_change() -> None:
    def model(tokens: Sequence[int]) -> np.ndarray:
        return np.log(np.array([0.9, 0.05, 0.05], np.float32))

    found, steps = run(model, [1], BeamSearchParams(2, 100, length_penalty=0.0))
    assert steps == 2 and [one.output for one in found] == [(EOS,), (1, EOS)]
    # Of long sequences more could become the best: a power of the length divides a negative number.
    assert run(model, [1], BeamSearchParams(2, 100, length_penalty=2.0))[1] > 2
    assert run(model, [1], BeamSearchParams(2, 100, length_penalty=2.0, early_stopping=True))[1] == 2


def test_a_token_without_probability_is_no_candidate() -> None:
    search = BeamSearch(BeamSearchParams(3, 4), 1, 5, (EOS,))
    proposed = Candidates(np.array([2, 1, 0], np.int32), np.array([-0.1, -2, -np.inf], np.float32))
    assert [one.token_id for one in search.advance([proposed])] == [2, 1]


@given(st.lists(st.sampled_from([0.0, -1.0, -2.5, -np.inf]), min_size=1, max_size=30), st.integers(1, 40))
def test_the_best_of_all_tokens_are_the_first_of_equal_ones(values: list[float], count: int) -> None:
    logprobs = np.array(values, np.float32)
    best = Candidates.best(logprobs, count)
    assert best.token_ids.tolist() == sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]
    assert best.logprobs.tolist() == [values[token] for token in best.token_ids]


def test_a_restart_forgets_everything() -> None:
    search = BeamSearch(BeamSearchParams(2, 4), 1, 5, (EOS,))
    search.advance([Candidates(np.array([0, 1], np.int32), np.array([-1, -1], np.float32))])
    search.restart()
    assert [beam.num_tokens for beam in search.beams] == [0] and not search.best() and not search.is_over


def test_a_beam_knows_its_tokens() -> None:
    root = Beam()
    first = Beam(root, 5, None, -1.0, 1)
    second = Beam(first, 6, None, -2.0, 2)
    assert second.path() == [first, second] and root.path() == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (dict(beam_width=0), "beam_width"),
        (dict(beam_width=2.0), "beam_width"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(temperature=-1), "temperature"),
        (dict(length_penalty=float("nan")), "length_penalty"),
        (dict(length_penalty=11), "length_penalty"),
        (dict(ignore_eos=1), "ignore_eos"),
        (dict(early_stopping="always"), "early_stopping"),
    ],
)
def test_a_bad_value_is_named(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError, match=param) as raised:
        BeamSearchParams(**dict(beam_width=2, max_tokens=3) | options)
    assert raised.value.param == param


def test_what_a_request_for_it_asks_for() -> None:
    params = BeamSearchParams(3, 9, early_stopping="never")
    assert params.early_stopping is False and params.logit_divisor == 1
    assert BeamSearchParams(3, 9, temperature=0.5).logit_divisor == 0.5
    sampling = params.sampling_params(SamplingParams(top_p=0.5, seed=3, logprobs=2, skip_special_tokens=False))
    assert (sampling.n, sampling.max_tokens, sampling.greedy, sampling.top_p) == (3, 9, True, 1.0)
    assert (sampling.logprobs, sampling.skip_special_tokens) == (2, False)
