"""Sampling parameters in an engine: each way to draw gives the same tokens alone, batched, in bursts and preempted."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import LLM, EngineConfig, SamplingParams, TokensSoFar
from jaxvllm.engine import input_processor
from jaxvllm.engine.burst_pace import BurstPace
from jaxvllm.engine.engine import Engine
from jaxvllm.runtime.logits_processors import run_processors
from jaxvllm.text.bad_words import read_bad_words
from tests.engine.tiny import (
    GREEDY,
    MAX_MODEL_LEN,
    Recomputation,
    assert_idle,
    assert_scores,
    few_pages,
    random_prompts,
    tiny_llm,
)
from tests.runtime.test_sampler import Row, processed

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
TOKENS = tuple(range(30, 120))
PENALTIES = dict(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3)
EVERYTHING: dict[str, Any] = dict(
    **PENALTIES,
    allowed_token_ids=TOKENS,
    logit_bias={40: 2.0, 41: -100.0, 60: 1.0},
    bad_words=["E", "ab", "x yz"],
    min_tokens=9,
    stop_token_ids=(42, 50, 51, 52),
)
WAYS = (
    replace(GREEDY, repetition_penalty=1.4),
    replace(GREEDY, frequency_penalty=1.5),
    replace(GREEDY, presence_penalty=-1.5),
    replace(SEEDED, **PENALTIES),
    replace(SEEDED, **PENALTIES, n=2, top_k=40),
    replace(GREEDY, logit_bias={65: 1.0, 70: -100.0}),
    replace(GREEDY, allowed_token_ids=TOKENS),
    replace(SEEDED, allowed_token_ids=TOKENS, top_p=0.9),
    replace(GREEDY, bad_words=["e", " a"]),
    replace(GREEDY, **EVERYTHING),
    replace(SEEDED, **EVERYTHING, min_p=0.01, logprobs=3),
    replace(SEEDED, **EVERYTHING, logprob_token_ids=[5, 70], n=2),
    SEEDED,
    GREEDY,
)
# Longer than a page, so that their beginnings are found again; repeated, so that requests share them.
PROMPTS = [*random_prompts(len(WAYS) - 4, longest=40, seed=21), *[list(range(50, 90))] * 4]


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(shared_llm: LLM) -> list[list[list[int]]]:
    """The tokens of each request on its own, one a step, computed from its first token on."""
    found = []
    for prompt, params in zip(PROMPTS, WAYS, strict=True):
        shared_llm.reset_prefix_cache()
        found += tokens(shared_llm, [prompt], [params])
    assert len({str(one) for one in found}) == len(WAYS), "each changes something"
    return found


def test_batched_and_chunked(llm: LLM, alone: list[list[list[int]]]) -> None:
    assert tokens(llm, PROMPTS, list(WAYS)) == alone


def test_behind_a_cached_prefix(llm: LLM, alone: list[list[list[int]]]) -> None:
    tokens(llm, PROMPTS, [replace(GREEDY, max_tokens=1)] * len(PROMPTS))
    outputs = llm.generate(PROMPTS, list(WAYS), use_tqdm=False)
    assert sum(output.num_cached_tokens > 0 for output in outputs) > 6
    assert [[one.token_ids for one in output.outputs] for output in outputs] == alone


def test_in_bursts(bursting: LLM, alone: list[list[list[int]]]) -> None:
    bursting.engine.take_reports()
    some = [index for index, params in enumerate(WAYS) if params.logprob_token_ids is None]
    got = tokens(bursting, [PROMPTS[i] for i in some], [WAYS[i] for i in some])
    assert got == [alone[i] for i in some]
    assert max(report.num_steps for report in bursting.engine.take_reports()) == 8


def test_a_row_that_wants_distributions_ends_the_bursts_and_changes_nothing(
    bursting: LLM, alone: list[list[list[int]]]
) -> None:
    assert tokens(bursting, PROMPTS, list(WAYS)) == alone


@pytest.mark.parametrize("width", ["llm", "bursting"])
def test_preempted(request: pytest.FixtureRequest, width: str, alone: list[list[list[int]]]) -> None:
    llm = request.getfixturevalue(width)
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, 10):
        assert tokens(llm, PROMPTS, list(WAYS)) == alone
    assert llm.engine.stats().num_preemptions > before


def test_a_slot_keeps_nothing_of_its_former_tenant(llm: LLM, alone: list[list[list[int]]]) -> None:
    # The engine has eight slots: all of them have had a tenant with everything.
    tokens(llm, PROMPTS[:8], [WAYS[9]] * 8)
    for index in (0, 1, 2, 3, 5, 6, 8, 12, 13):
        assert tokens(llm, [PROMPTS[index]] * 8, [WAYS[index]] * 8) == [alone[index]] * 8


def test_greedy_tokens_are_those_of_the_documented_operations(
    llm: LLM, recomputation: Recomputation, alone: list[list[list[int]]]
) -> None:
    bad_words = read_bad_words(EVERYTHING["bad_words"], llm.get_tokenizer(), llm.engine.vocab_size)
    [output] = alone[9]
    logits = recomputation.logits(PROMPTS[9], output)
    for index, one in enumerate(logits):
        row = Row(
            allowed_token_ids=TOKENS,
            logit_bias=tuple(EVERYTHING["logit_bias"].items()),
            min_length=len(PROMPTS[9]) + 9,
            stop_ids=EVERYTHING["stop_token_ids"],
            bad_words=bad_words,
            prompt=tuple(PROMPTS[9]),
            output=tuple(output[:index]),
            **PENALTIES,
        )
        assert processed(one, row).argmax() == output[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logit_bias={10**6: 1}), "logit_bias: token id 1000000 is outside the vocabulary"),
        (dict(allowed_token_ids=[10**6]), "allowed_token_ids: token id 1000000 is outside the vocabulary"),
        (dict(logprob_token_ids=[10**6]), "logprob_token_ids: token id 1000000 is outside the vocabulary"),
        (dict(bad_words=["  "]), "bad_words must each have a character that is no space"),
        (dict(bad_words=["abcdefgh" * 20] * 10), "bad_words have 3200 tokens together, the limit is 1024"),
        (dict(logprobs=21), "logprobs must be an integer from 0 to 20, not 21: .*max_logprobs"),
        (dict(logprobs=-1), "logprobs must be an integer from 0 to 20, not -1"),
        (dict(prompt_logprobs=21), "prompt_logprobs must be an integer from 0 to 20, not 21: .*max_logprobs"),
        (dict(prompt_logprobs=-1), "prompt_logprobs must be an integer from 0 to 20, not -1"),
    ],
)
def test_what_is_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[5, 6]], SamplingParams(**options), use_tqdm=False)


def test_the_bad_words_of_all_completions_are_read_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(input_processor, "read_bad_words", lambda *asked: read.append(asked) or read_bad_words(*asked))
    engine = llm.engine
    request = engine.check("three", [5, 6], SamplingParams(bad_words=["e"], n=3, max_tokens=2))
    read.clear()
    engine.submit(request)
    assert len(read) == 1
    engine.abort("three")


# Log-probabilities.


def test_the_log_probabilities_of_named_tokens(llm: LLM) -> None:
    named = [9, 3, 200]
    few = replace(SEEDED, logprobs=20)
    [[best], [chosen]] = (
        output.outputs
        for output in llm.generate(
            [PROMPTS[0]] * 2, [few, replace(few, logprobs=None, logprob_token_ids=named)], use_tqdm=False
        )
    )
    assert best.token_ids == chosen.token_ids
    assert chosen.cumulative_logprob == pytest.approx(best.cumulative_logprob, abs=1e-3)
    for token_id, ranked, known in zip(chosen.token_ids, chosen.logprobs or (), best.logprobs or (), strict=True):
        assert list(ranked) == list(dict.fromkeys([token_id, *named]))
        for one in ranked.keys() & known.keys():
            assert ranked[one].logprob == pytest.approx(known[one].logprob, abs=1e-4)
            assert ranked[one].rank == known[one].rank
            assert ranked[one].decoded_token == known[one].decoded_token


@pytest.fixture(scope="module")
def unlimited(tiny_checkpoint: Path) -> Any:
    """Reports what is drawn from, of as many tokens as a request wants, and forbids the last token of each row."""
    with tiny_llm(
        tiny_checkpoint, max_logprobs=-1, logprobs_mode="processed_logprobs", logits_processors=[never_twice]
    ) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def roomy(tiny_checkpoint: Path) -> Any:
    """Its steps hold more tokens than are scored widely at once."""
    with tiny_llm(tiny_checkpoint, max_logprobs=100, max_num_batched_tokens=256, token_buckets=(256,)) as llm:
        yield llm
        assert_idle(llm)


def never_twice(logits: jax.Array, tokens: TokensSoFar) -> jax.Array:
    rows = jnp.arange(len(logits))
    last = tokens.token_ids[rows, tokens.num_tokens - 1]
    is_output = tokens.num_tokens > tokens.num_prompt_tokens
    return jnp.where(is_output[:, None], logits.at[rows, last].set(-jnp.inf), logits)


@pytest.mark.parametrize("count", [3, 20, 21, 100, -1])
def test_processed_log_probabilities_are_of_what_is_drawn_from(
    unlimited: LLM, recomputation: Recomputation, count: int
) -> None:
    params = replace(SEEDED, temperature=0.7, top_k=30, logit_bias={65: 3.0}, logprobs=count, max_tokens=6)
    [[one], *_] = [output.outputs for output in unlimited.generate([PROMPTS[0]] * 10, params, use_tqdm=False)]
    logits = recomputation.logits(PROMPTS[0], one.token_ids)
    vocab_size = logits.shape[1]
    for index, (token_id, ranked) in enumerate(zip(one.token_ids, one.logprobs or (), strict=True)):
        expected = logits[index].astype(np.float64)
        expected[65] += 3
        if index:
            expected[one.token_ids[index - 1]] = -np.inf
        expected = np.where(expected >= np.sort(expected)[-30], expected / 0.7, -np.inf)
        expected -= np.log(np.exp(expected).sum())
        most = vocab_size if count == -1 else count
        assert next(iter(ranked)) == token_id
        assert len(ranked) == most + (token_id not in np.argsort(-expected, kind="stable")[:most])
        for token, logprob in ranked.items():
            assert logprob.logprob == pytest.approx(expected[token], abs=1e-3)
        assert sorted(logprob.rank or 0 for logprob in ranked.values())[:most] == list(range(1, most + 1))


@pytest.mark.parametrize("width", ["unlimited", "roomy"])
def test_wide_scores_are_those_of_the_model(
    request: pytest.FixtureRequest, width: str, recomputation: Recomputation
) -> None:
    """Steps of 16 tokens cut the prompts anywhere, and in others there is no room for the scores of all tokens."""
    llm: LLM = request.getfixturevalue(width)
    counts = (-1 if width == "unlimited" else 60, 21, None, 3, 100)
    prompts = [*random_prompts(4, longest=60, seed=7), list(range(50, 90)), list(range(50, 90))]
    prompts = [one * 3 for one in prompts] if width == "roomy" else prompts
    prompts = [one[: MAX_MODEL_LEN - 21] for one in prompts]
    few = 10 if width == "unlimited" else 14
    params = [
        replace(GREEDY, prompt_logprobs=counts[i % len(counts)], logprobs=(None, 30, 2)[i % 3], max_tokens=20)
        for i in range(len(prompts))
    ]
    # One whose tokens wait for masks, between the scores and the sampling.
    params[1] = replace(params[1], structured_outputs={"regex": "(ab|cd)+"})
    plain = tokens(llm, prompts, [replace(one, prompt_logprobs=None, logprobs=None) for one in params])
    for num_pages in (None, few):  # then also preempted, and scored again
        with few_pages(llm, num_pages) if num_pages else nullcontext():
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, one in zip(outputs, params, strict=True):
            if one.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                assert_scores(llm, recomputation, output, one.prompt_logprobs, near=1e-5)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == plain
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


def test_wide_scores_have_room_in_each_step(roomy: LLM) -> None:
    roomy.engine.take_reports()
    score = SamplingParams(max_tokens=0, prompt_logprobs=30)
    roomy.generate([[7] * 100] * 3 + [[5] * 50], [score] * 3 + [replace(score, prompt_logprobs=20)], use_tqdm=False)
    # 300 tokens, 64 in a step at most, and the other prompt beside them.
    assert [report.num_prefill for report in roomy.engine.take_reports()] == [114, 64, 64, 64, 44]


def test_logits_processors_are_part_of_every_step(
    unlimited: LLM, recomputation: Recomputation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(widest: int) -> None:
        unlimited.engine.take_reports()
        outputs = tokens(unlimited, PROMPTS[:8], [replace(GREEDY, max_tokens=16)] * 8)
        for prompt, [output] in zip(PROMPTS, outputs, strict=False):
            logits = recomputation.logits(prompt, output).copy()
            logits[np.arange(1, len(output)), output[:-1]] = -np.inf
            assert logits.argmax(-1).tolist() == output
        assert max(report.num_steps for report in unlimited.engine.take_reports()) == widest

    unlimited.wait_until_compiled()
    for widest, seconds in ((1, 0.0), (8, 1e9)):
        pace = BurstPace(max_seconds=seconds)
        for num_rows in range(1, 9):
            pace.measured(num_rows, 1, 1e-3)
        monkeypatch.setattr(unlimited.engine.replicas[0].pace, "_plain", pace)
        check(widest)


def test_a_logits_processor_keeps_the_shape() -> None:
    nothing = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"processor half must return float32\[2, 10\], .* not float32\[2, 5\]"):
        run_processors([half], jnp.zeros((2, 10)), TokensSoFar(jnp.zeros((2, 4), jnp.int32), nothing, nothing))


def half(logits: jax.Array, tokens: TokensSoFar) -> jax.Array:
    return logits[:, ::2]


def test_functions_do_not_cross_to_other_processes() -> None:
    config = EngineConfig(coordinator="localhost:1234", num_processes=2, process_id=0)
    with pytest.raises(ValueError, match="logits_processors are functions, which other processes cannot get"):
        Engine(config, logits_processors=(half,))
