"""Beam search by the engine: what a plain search over recomputed logits finds, however it is scheduled."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxvllm import LLM, BeamSearchParams, SamplingParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.engine.outputs import BeamSearchOutput
from tests.core.beam_oracle import Found, Model, beam_search, exhaustive_search
from tests.engine.tiny import (
    GREEDY,
    Recomputation,
    assert_idle,
    few_pages,
    greedy_tokens,
    random_prompts,
    tiny_llm,
)
from tests.models.fixture import Fixture

PROMPTS = random_prompts(3, longest=12, seed=3)
LONG = list(range(60, 101))  # three steps of 16 tokens, and two full pages and a part of one


@pytest.fixture(scope="module")
def model(recomputation: Recomputation) -> Model:
    @cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        [logits] = recomputation.logits(tokens, [0])
        return np.asarray(logits - np.logaddexp.reduce(logits), np.float32)

    return lambda tokens: logprobs(tuple(tokens))


def cooled(model: Model, temperature: float) -> Model:
    def logprobs(tokens: Sequence[int]) -> np.ndarray:
        logits = model(tokens) / np.float32(temperature)
        return np.asarray(logits - np.logaddexp.reduce(logits), np.float32)

    return logprobs


def eos_of(llm: LLM) -> int:
    [eos] = llm.engine.eos_token_ids
    return eos


def expected(model: Model, prompt: Sequence[int], params: BeamSearchParams, eos: int) -> list[Found]:
    return beam_search(
        model,
        prompt,
        params.beam_width,
        params.max_tokens,
        eos,
        params.length_penalty,
        params.ignore_eos,
        params.early_stopping is True,
    )


def check(output: BeamSearchOutput, prompt: Sequence[int], best: list[Found]) -> None:
    assert [one.tokens for one in output.sequences] == [[*prompt, *found.output] for found in best]
    assert [one.cum_logprob for one in output.sequences] == pytest.approx(
        [found.cum_logprob for found in best], abs=1e-3
    )


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_it_finds_what_a_plain_search_finds(llm: LLM, model: Model, width: int, penalty: float) -> None:
    params = BeamSearchParams(width, 6, length_penalty=penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        check(output, prompt, expected(model, prompt, params, eos_of(llm)))


def test_one_beam_is_greedy(llm: LLM) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 12, ignore_eos=True))
    assert [output.sequences[0].tokens for output in outputs] == [
        [*prompt, *tokens] for prompt, tokens in zip(PROMPTS, greedy_tokens(llm, PROMPTS, 12), strict=True)
    ]


@pytest.mark.parametrize("early", [False, True])
def test_eos_completes_sequences(llm: LLM, model: Model, early: bool) -> None:
    eos = eos_of(llm)
    # After these tokens EOS is among the likeliest.
    prompts = [[token, 40] for token in range(2, 250) if (model([token, 40]) > model([token, 40])[eos]).sum() < 8][:4]
    assert len(prompts) == 4
    params = BeamSearchParams(4, 5, early_stopping=early, length_penalty=0.0)
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, prompt, expected(model, prompt, params, eos))
        for one in output.sequences:
            is_complete = one.tokens[-1] == eos
            assert (one.finish_reason, one.stop_reason) == (("stop", eos) if is_complete else ("length", None))
    assert sum(one.tokens[-1] == eos for output in outputs for one in output.sequences) >= 4
    ignoring = replace(params, ignore_eos=True, early_stopping=False)
    for prompt, output in zip(prompts, llm.beam_search(prompts, ignoring), strict=True):
        assert all(len(one.tokens) == len(prompt) + 5 for one in output.sequences)
        check(output, prompt, expected(model, prompt, ignoring, eos))


def test_a_long_prompt_is_computed_in_chunks_and_found_again(llm: LLM, model: Model) -> None:
    params = BeamSearchParams(3, 20, ignore_eos=True)
    best = expected(model, LONG, params, eos_of(llm))
    for cached in (0, 32):
        request = llm.engine.check("r", LONG, params.sampling_params(SamplingParams(logprobs=0)), beam_search=params)
        llm.engine.submit(request)
        while llm.engine.has_work:
            outputs = llm.engine.step()
        assert outputs[-1].num_cached_tokens == cached
        assert [completion.token_ids for completion in outputs[-1].outputs] == [list(found.output) for found in best]


@pytest.mark.parametrize(
    "params", [BeamSearchParams(12, 6), BeamSearchParams(15, 7, True, temperature=0.5)], ids=["12", "15-cooled"]
)
def test_more_beams_than_a_step_reports_candidates_for(wide_llm: LLM, model: Model, params: BeamSearchParams) -> None:
    at = cooled(model, params.logit_divisor)
    prompts = [LONG[:28], LONG[5:33]]  # the third page is opened after 32 tokens, by each beam
    best = [expected(at, prompt, params, eos_of(wide_llm)) for prompt in prompts]
    for num_pages in (256, 33):  # then also preempted
        before = wide_llm.engine.stats().num_preemptions
        with few_pages(wide_llm, num_pages):
            outputs = wide_llm.beam_search(prompts, params)
        for prompt, output, of_one in zip(prompts, outputs, best, strict=True):
            check(output, prompt, of_one)
            assert all(len(ranked) == params.num_candidates for one in output.sequences for ranked in one.logprobs)
    assert wide_llm.engine.stats().num_preemptions > before


def test_other_requests_run_beside_it(wide_llm: LLM, llm: LLM, model: Model) -> None:
    beams, prompts = BeamSearchParams(4, 10, ignore_eos=True), random_prompts(12, longest=40, seed=8)
    params = [replace(GREEDY, temperature=i % 2, seed=i, max_tokens=20) for i in range(12)]
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    found: dict[str, list[list[int]]] = {}
    engine = wide_llm.engine
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(engine.check(f"plain{index}", prompt, replace(one, output_kind=RequestOutputKind.FINAL_ONLY)))
        if index < len(PROMPTS):
            sampling = beams.sampling_params(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
            engine.submit(engine.check(f"beams{index}", PROMPTS[index], sampling, beam_search=beams))
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = [completion.token_ids for completion in output.outputs]
    assert [found[f"plain{index}"] for index in range(12)] == [[tokens] for tokens in alone]
    for index, prompt in enumerate(PROMPTS):
        best = expected(model, prompt, beams, eos_of(llm))
        assert found[f"beams{index}"] == [list(one.output) for one in best]


def test_a_search_without_pages_starts_again(llm: LLM, model: Model) -> None:
    params = BeamSearchParams(3, 36, ignore_eos=True)
    best = [expected(model, prompt, params, eos_of(llm)) for prompt in PROMPTS[:2]]
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, 9):
        outputs = llm.beam_search(PROMPTS[:2], params)
    assert llm.engine.stats().num_preemptions > before
    for prompt, output, of_one in zip(PROMPTS, outputs, best, strict=False):
        check(output, prompt, of_one)


def test_the_temperature_divides_the_logits(llm: LLM, model: Model) -> None:
    params = BeamSearchParams(3, 5, temperature=0.5)
    [output] = llm.beam_search([PROMPTS[0]], params)
    check(output, PROMPTS[0], expected(cooled(model, 0.5), PROMPTS[0], params, eos_of(llm)))


def test_a_sequence_tells_all_about_itself(llm: LLM) -> None:
    [output] = llm.beam_search("Once upon", BeamSearchParams(2, 4))
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("Once upon")
    for one in output.sequences:
        assert one.tokens[: len(prompt)] == prompt
        assert one.text == tokenizer.decode(one.tokens, skip_special_tokens=False)
        chosen = one.tokens[len(prompt) :]
        assert [len(ranked) for ranked in one.logprobs] == [4] * len(chosen)
        assert [next(iter(ranked)) for ranked in one.logprobs] == chosen
        total = sum(ranked[token].logprob for token, ranked in zip(chosen, one.logprobs, strict=True))
        assert one.cum_logprob == pytest.approx(total)
        assert [sorted(entry.rank or 0 for entry in ranked.values()) for ranked in one.logprobs][0] == [1, 2, 3, 4]


def test_prompts_may_take_turns(llm: LLM) -> None:
    params = BeamSearchParams(2, 5)
    assert llm.beam_search(PROMPTS, params, concurrency_limit=1) == llm.beam_search(PROMPTS, params)


def test_an_abort_leaves_nothing(llm: LLM) -> None:
    params = BeamSearchParams(4, 40, ignore_eos=True)
    sampling = params.sampling_params(SamplingParams())
    for steps in (0, 1, 2, 3, 5):
        llm.engine.submit(llm.engine.check("r", LONG, sampling, beam_search=params))
        for _ in range(steps):
            llm.engine.step()
        output = llm.engine.abort("r")
        assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
        while llm.engine.has_work:
            llm.engine.step()
        assert_idle(llm)


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="9 exceeds the 8 sequences that run at once"):
        llm.beam_search(PROMPTS, BeamSearchParams(9, 4))
    with pytest.raises(ValueError, match="params must be BeamSearchParams, not SamplingParams"):
        llm.beam_search(PROMPTS, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="concurrency_limit must be at least 1, not 0"):
        llm.beam_search(PROMPTS, BeamSearchParams(2, 4), concurrency_limit=0)


# All sequences that there are.

VOCAB_SIZE, EOS = 3, 0


@pytest.fixture(scope="module")
def three_words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Recomputation]]:
    directory: Path = tmp_path_factory.mktemp("three")
    small = Fixture.load("llama")
    shapes = {
        name: [VOCAB_SIZE, *shape[1:]] if shape[0] == small.config["vocab_size"] else shape
        for name, shape in small.shapes.items()
    }
    config = small.config | {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": None}
    replace(small, config=config, shapes=shapes).write_checkpoint(directory)
    with tiny_llm(directory, max_num_seqs=9, row_buckets=(9,), max_decode_burst=1, warm_up="background") as llm:
        yield llm, Recomputation(directory)
        assert_idle(llm)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
def test_wide_beams_find_the_best_of_all(three_words: tuple[LLM, Recomputation], penalty: float) -> None:
    llm, recomputation = three_words
    assert llm.engine.eos_token_ids == (EOS,)

    @cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        [logits] = recomputation.logits(tokens, [0])
        return np.asarray(logits - np.logaddexp.reduce(logits), np.float32)

    for prompt in ([1], [2, 1, 2]):
        # No more than 9 sequences of two tokens go on: none is pruned.
        [output] = llm.beam_search([prompt], BeamSearchParams(9, 3, length_penalty=penalty))
        check(output, prompt, exhaustive_search(lambda t: logprobs(tuple(t)), prompt, 9, 3, EOS, VOCAB_SIZE, penalty))
        # A cut of 5 of the 9 loses what began badly, and finds what the plain search finds.
        [output] = llm.beam_search([prompt], params := BeamSearchParams(3, 6, length_penalty=penalty))
        check(output, prompt, expected(lambda t: logprobs(tuple(t)), prompt, params, EOS))
