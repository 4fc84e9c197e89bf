"""What a user of `LLM` may rely on."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tqdm import tqdm

from jaxvllm import LLM, RequestOutput, RequestOutputKind, SamplingParams
from jaxvllm.core.step_sizes import StepSizes
from jaxvllm.runtime.runner import Runner
from tests.engine.tiny import (
    GREEDY,
    MAX_MODEL_LEN,
    Recomputation,
    assert_idle,
    assert_scores,
    few_pages,
    greedy_tokens,
    random_prompts,
    tiny_llm,
)

PROMPTS = random_prompts(20, longest=60, seed=3)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_results_are_in_input_order_with_all_fields(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=1 + (7 * i) % 20) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        assert output.prompt is None and output.prompt_token_ids == prompt and output.finished
        [completion] = output.outputs
        assert completion.index == 0 and completion.finished()
        assert len(completion.token_ids) == one.max_tokens
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert completion.logprobs is None and completion.cumulative_logprob is None


def test_every_way_to_give_a_prompt(llm: LLM) -> None:
    text = "Once upon a time"
    tokens = llm.get_tokenizer().encode(text)
    given: list[Any] = [text, tokens, {"prompt": text}, {"prompt_token_ids": tokens}, tuple(tokens), np.array(tokens)]
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None, None, None]
    assert texts(llm.generate(text, GREEDY, use_tqdm=False)) == texts(outputs[:1])
    assert texts(llm.generate(tokens, GREEDY, use_tqdm=False)) == texts(outputs[:1])
    assert texts(llm.generate({"prompt": text}, GREEDY, use_tqdm=False)) == texts(outputs[:1])


def test_n_completions(llm: LLM) -> None:
    [output] = llm.generate([PROMPTS[0]], replace(SAMPLED, n=3), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_no_text_unless_wanted(llm: LLM) -> None:
    [output] = llm.generate([PROMPTS[0]], replace(GREEDY, detokenize=False), use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_chat(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    rendered = tokenizer.apply_chat_template(MESSAGES)
    [output] = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert output.prompt == rendered
    assert output.prompt_token_ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert output.outputs[0].token_ids == greedy_tokens(llm, [output.prompt_token_ids])[0]
    several = llm.chat([MESSAGES, [*MESSAGES, {"role": "assistant", "content": "yes"}]], GREEDY, use_tqdm=False)
    assert several[0].outputs == output.outputs and several[1].prompt != rendered


# Log-probabilities.


@pytest.mark.parametrize("params", [replace(GREEDY, logprobs=5), replace(SAMPLED, top_k=30, logprobs=3)])
def test_logprobs_are_those_of_the_model(llm: LLM, recomputation: Recomputation, params: SamplingParams) -> None:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    count = params.logprobs
    assert count is not None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        [completion] = output.outputs
        logits = recomputation.logits(prompt, completion.token_ids).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        for token_id, row, given in zip(completion.token_ids, expected, completion.logprobs, strict=True):
            best = np.argsort(-row)
            assert set(given) == {token_id, *best[:count].tolist()}
            for one, logprob in given.items():
                assert logprob.logprob == pytest.approx(row[one], abs=1e-4)
                assert logprob.rank == best.tolist().index(one) + 1
                assert logprob.decoded_token == llm.get_tokenizer().token_text(one)
        chosen = [row[token_id] for row, token_id in zip(expected, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)


def test_prompt_logprobs_are_those_of_the_model(llm: LLM, recomputation: Recomputation) -> None:
    # Steps of 16 tokens cut them anywhere, others decode meanwhile, and what is cached is scored all the same.
    counts = [(None, 0, 5)[i % 3] for i in range(len(PROMPTS))]
    params = [replace(GREEDY, prompt_logprobs=count, logprobs=i % 2 or None) for i, count in enumerate(counts)]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for count, output in zip(counts, outputs, strict=True):
            if count is None:
                assert output.prompt_logprobs is None
            else:
                assert output.num_cached_tokens == 0
                assert_scores(llm, recomputation, output, count)
    assert texts(outputs) == texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_a_prompt_is_scored_once_for_n_completions_and_again_after_a_preemption(
    llm: LLM, recomputation: Recomputation
) -> None:
    prompts = [list(range(10 + i, 60 + i)) for i in range(3)]
    params = replace(SAMPLED, n=2, prompt_logprobs=2, max_tokens=40)
    with few_pages(llm, 14):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    for output in outputs:
        assert_scores(llm, recomputation, output, 2)


def test_a_prompt_of_the_models_length_is_scored(llm: LLM, recomputation: Recomputation) -> None:
    """Nothing is to be generated, so that no room is needed after the prompt."""
    score = SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1)
    longest = np.random.default_rng(9).integers(2, 256, MAX_MODEL_LEN).tolist()
    prompts = [longest, longest[:20], longest[:1]]
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
        company = [*prompts, longest[:30]]
        params = [*[replace(score, output_kind=kind, n=1 + i) for i in range(3)], GREEDY]
        *outputs, other = llm.generate(company, params, use_tqdm=False)
        for number, output in enumerate(outputs, 1):
            assert_scores(llm, recomputation, output, 2)
            assert len(output.outputs) == number
            for completion in output.outputs:
                assert (completion.text, completion.token_ids, completion.logprobs) == ("", [], [])
                assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert recomputation.is_greedy(other.prompt_token_ids, other.outputs[0].token_ids)
    [streamed] = llm.stream(longest, replace(score, output_kind=RequestOutputKind.DELTA))
    assert streamed.finished and streamed.outputs[0].token_ids == []
    assert_scores(llm, recomputation, streamed, 2)
    # A stop token that happens to follow is no reason for an end that the caller could see.
    [following] = greedy_tokens(llm, [longest[:20]], max_tokens=1)
    stop = replace(score, temperature=0, stop_token_ids=following)
    [stopped] = llm.generate([longest[:20]], stop, use_tqdm=False)
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("length", None)


def test_a_prompt_beyond_the_models_length_is_not(llm: LLM) -> None:
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(ValueError, match="prompt of 129 tokens exceeds max_model_len 128: shorten it"):
        llm.generate([[5] * (MAX_MODEL_LEN + 1)], score, use_tqdm=False)
    with pytest.raises(ValueError, match="leaves no room for an output"):
        llm.generate([[5] * MAX_MODEL_LEN], replace(score, max_tokens=1), use_tqdm=False)


def test_a_scored_prompt_needs_no_more_pages_than_it_fills(llm: LLM, recomputation: Recomputation) -> None:
    longest = np.random.default_rng(9).integers(2, 256, MAX_MODEL_LEN).tolist()
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with few_pages(llm, MAX_MODEL_LEN // 16):
        outputs = llm.generate([longest, longest], score, use_tqdm=False)
    for output in outputs:
        assert_scores(llm, recomputation, output, 0)


def test_asking_for_logprobs_changes_no_token(llm: LLM) -> None:
    for params in (GREEDY, SAMPLED):
        plain = llm.generate(PROMPTS, params, use_tqdm=False)
        mixed = [replace(params, logprobs=i % 3) if i % 2 else params for i in range(len(PROMPTS))]
        asked = llm.generate(PROMPTS, mixed, use_tqdm=False)
        assert texts(asked) == texts(plain)
        assert [len(o.outputs[0].logprobs or ()) > 0 for o in asked] == [i % 2 == 1 for i in range(len(PROMPTS))]


# The prefix cache.


def test_cached_tokens_are_counted_and_salts_keep_apart(llm: LLM) -> None:
    prompt = list(range(10, 60))

    def cached(salt: str | None) -> int:
        given: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        return llm.generate(given, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached(salt) for salt in (None, None, "a", "a", "b", None)] == [0, 48, 0, 48, 0, 48]
    # A generated page is found again too: prompt and output together are a later prompt's prefix.
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    longer = [*prompt, *output.outputs[0].token_ids, 5]
    assert llm.generate([longer], GREEDY, use_tqdm=False)[0].num_cached_tokens == 64


def test_n_completions_share_their_prompts_pages(llm: LLM) -> None:
    engine = llm.engine
    engine.submit(engine.check("three", list(range(2, 66)), replace(SAMPLED, n=3)))
    most = 0
    while engine.has_work:
        engine.step()
        engine.replicas[0].scheduler.check_invariants()
        most = max(most, engine.stats().num_pages_owned)
    assert most <= 3 + 3 * 3  # 3 full pages of the prompt once; the last one and two of output each


# Streaming.


@pytest.mark.parametrize("options", [{}, {"stop": ["e"]}, {"logprobs": 2}, {"n": 3}, {"n": 2, "stop": "a"}])
def test_a_stream_adds_up_to_the_final_text(llm: LLM, options: dict[str, Any]) -> None:
    params = replace(SAMPLED, **options)
    for prompt in PROMPTS[:6]:
        [whole] = llm.generate([prompt], params, use_tqdm=False)
        cumulative = list(llm.stream(prompt, params))
        deltas = list(llm.stream(prompt, replace(params, output_kind=RequestOutputKind.DELTA)))
        assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
        assert cumulative[-1].outputs == whole.outputs
        for index, completion in enumerate(whole.outputs):
            parts = [part for output in deltas for part in output.outputs if part.index == index]
            assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True], (
                "ends once"
            )
            assert "".join(part.text for part in parts) == completion.text
            assert [token for part in parts for token in part.token_ids] == completion.token_ids
            assert parts[-1].finish_reason == completion.finish_reason
            assert parts[-1].stop_reason == completion.stop_reason
            logprobs = [one for part in parts for one in part.logprobs or ()]
            assert logprobs == (completion.logprobs or [])
            shown = [output.outputs[index].text for output in cumulative]
            # Nothing shown is ever taken back, be it half a character or the beginning of a stop string.
            assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
        if params.n == 1:
            assert len(deltas) == len(whole.outputs[0].token_ids)  # one output a token


def test_a_stream_never_shows_half_a_character(llm: LLM) -> None:
    """Fed with the tokens of a text of many bytes a character, through the engine's own output path."""
    text = "日本語 ёж 🦊 é"  # not in the tokenizer's training text: mostly a token a byte
    tokens = iter(llm.get_tokenizer().encode(text, add_special_tokens=False))
    collect = llm.engine.replicas[0].runner.collect

    def scripted(step: Any) -> Any:
        output = collect(step)
        return replace(output, tokens=np.full_like(output.tokens, next(tokens, 0)))

    count = len(llm.get_tokenizer().encode(text, add_special_tokens=False))
    assert count > 1.5 * len(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.replicas[0].runner, "collect", scripted)
        shown = [output.outputs[0].text for output in llm.stream([5], replace(GREEDY, max_tokens=count))]
    assert shown[-1] == text
    assert all(text.startswith(part) and "\ufffd" not in part for part in shown)


def test_an_open_stream_has_the_engine_for_itself(llm: LLM) -> None:
    [expected] = texts(llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False))
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="a stream of this LLM is still open: read it to its end or close it"):
        llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="still open"):
        next(llm.stream(PROMPTS[1], GREEDY))
    assert texts(list(stream)[-1:]) == [expected]


# Endings that nobody planned.


def test_a_stream_that_is_dropped_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert llm.engine.stats().num_pages_owned > 0
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_abort_frees_pages_midway(llm: LLM) -> None:
    engine = llm.engine
    kinds = {"plain": GREEDY, "watched": replace(GREEDY, logprobs=1), "three": replace(SAMPLED, n=3)}
    for name, params in kinds.items():
        engine.submit(engine.check(name, PROMPTS[0], params))
    for _ in range(12):
        engine.step()
        engine.replicas[0].scheduler.check_invariants()
    for name, params in kinds.items():
        output = engine.abort(name)
        assert output is not None and output.finished and len(output.outputs) == params.n
        assert {completion.finish_reason for completion in output.outputs} == {"abort"}
        assert all(completion.token_ids and completion.text for completion in output.outputs), "what it had so far"
        engine.replicas[0].scheduler.check_invariants()
    assert engine.stats().num_pages_owned == 0
    assert engine.has_work  # a step is still on its way; its tokens are nobody's
    assert [engine.step(), engine.step()] == [[], []]
    assert not engine.has_work


def interrupt_after(count: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, but its `count`-th use is Ctrl-C."""
    uses = itertools.count(1)

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(uses) == count:
            raise KeyboardInterrupt
        return call(*args, **options)

    return interrupted


@pytest.mark.parametrize("where", ["step", "collect", "bar"])
def test_ctrl_c_leaves_the_engine_idle(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(llm.engine, "step", interrupt_after(5, llm.engine.step))
        elif where == "collect":
            patch.setattr(
                llm.engine.replicas[0].runner, "collect", interrupt_after(5, llm.engine.replicas[0].runner.collect)
            )
        else:
            patch.setattr(tqdm, "update", interrupt_after(3, tqdm.update))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert len(greedy_tokens(llm, PROMPTS[:1])[0]) == GREEDY.max_tokens


@pytest.mark.parametrize("computed", [False, True], ids=["before the program", "after it took the pages along"])
def test_a_step_that_breaks_off_leaves_no_wrong_prefix(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, computed: bool
) -> None:
    expected = greedy_tokens(llm, PROMPTS)
    llm.reset_prefix_cache()
    llm.generate([prompt[::-1] for prompt in PROMPTS], GREEDY, use_tqdm=False)  # other keys and values in the pages
    llm.reset_prefix_cache()
    programs = llm.engine.replicas[0].runner.programs
    wait_for = programs.wait_for

    def broken(bucket: Any) -> Any:
        program = wait_for(bucket)

        def call(*args: Any) -> None:
            if computed:
                program(*args)
            raise KeyboardInterrupt

        return call

    with monkeypatch.context() as patch:
        patch.setattr(programs, "wait_for", broken)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert greedy_tokens(llm, PROMPTS) == expected


def test_a_reset_that_breaks_off_too_is_made_up_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = greedy_tokens(llm, PROMPTS)
    runner = llm.engine.replicas[0].runner

    def broken(*_: Any) -> None:
        raise MemoryError("no pages")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for reset, told in ((broken, "no step"), (interrupted, None)):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "dispatch", lambda plan: (_ for _ in ()).throw(MemoryError("no step")))
            patch.setattr(runner, "reset", reset)
            with pytest.raises((MemoryError, KeyboardInterrupt), match=told):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert greedy_tokens(llm, PROMPTS) == expected
        assert_idle(llm)


def test_a_submission_that_breaks_off_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.replicas[0].scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:2], replace(GREEDY, n=2), use_tqdm=False)
    assert llm.engine.outputs.num_requests == 0
    assert_idle(llm)


def test_closed_is_closed(tiny_checkpoint: Path) -> None:
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    # How many steps a burst has depends on how long each took here: with eight under way it kept 11,328 bytes once.
    with tiny_llm(tiny_checkpoint, warm_up="background", max_decode_burst=1) as llm:
        stream = llm.stream([1, 2], GREEDY)
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    llm.close()  # again does no harm
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    gc.collect()
    # The memory is free while the LLM is still there: what two steps under way came to is all that it keeps.
    assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) < 10_000


def test_the_chosen_token_comes_first_among_logprobs(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[:1], replace(SAMPLED, logprobs=2), use_tqdm=False)
    [completion] = output.outputs
    assert completion.logprobs is not None
    assert [next(iter(ranked)) for ranked in completion.logprobs] == completion.token_ids
    chosen = [ranked[token].logprob for ranked, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


# Measures.


def test_metrics(llm: LLM) -> None:
    with few_pages(llm, 9):
        outputs = llm.generate(PROMPTS, replace(GREEDY, max_tokens=40), use_tqdm=False)
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        queued, first, total = metrics.queued_seconds, metrics.first_token_seconds, metrics.total_seconds
        assert queued is not None and first is not None and total is not None
        assert 0 <= queued <= first <= total < 60
    preempted = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert max(preempted) > 0
    assert outputs[0].metrics.queued_seconds < outputs[-1].metrics.queued_seconds  # type: ignore[union-attr, operator]


def test_stats_count_tokens(llm: LLM) -> None:
    before = llm.engine.stats()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = llm.engine.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == sum(map(len, PROMPTS))
    assert after.num_output_tokens - before.num_output_tokens == len(PROMPTS) * 24
    assert after.num_steps > before.num_steps


def test_stats_count_what_steps_compute_for_nothing(llm: LLM) -> None:
    """What is computed is a wanted token, padding, or a token of a row that has ended."""
    llm.engine.take_reports()
    before = llm.engine.stats()
    params = [replace(GREEDY, max_tokens=count) for count in (3, 5, 9)]
    llm.generate([PROMPTS[0][:7], PROMPTS[1][:9], PROMPTS[2][:5]], params, use_tqdm=False)
    after, reports = llm.engine.stats(), llm.engine.take_reports()
    real = 7 + 9 + 5 + (3 - 1) + (5 - 1) + (9 - 1)  # the last token of a prompt yields the first of the answer
    bucket, padding = (
        after.num_bucket_tokens - before.num_bucket_tokens,
        after.num_padding_tokens - before.num_padding_tokens,
    )
    ended = after.num_ended_tokens - before.num_ended_tokens
    assert bucket == sum(report.bucket_tokens for report in reports)
    assert bucket - padding == sum(report.num_decode + report.num_prefill for report in reports)
    assert padding > 0
    assert bucket - padding - ended == real
    rows = after.num_bucket_rows - before.num_bucket_rows
    assert rows - (after.num_padding_rows - before.num_padding_rows) == sum(report.num_rows for report in reports)


@pytest.mark.parametrize(("overhead", "lengths"), [(0, [16, 4]), (10, [20])])
def test_tokens_are_the_same_where_a_step_is_cut_to_a_size(
    wide_llm: LLM, monkeypatch: pytest.MonkeyPatch, overhead: int, lengths: list[int]
) -> None:
    prompts = [list(range(3, 23))]
    whole = wide_llm.generate(prompts, GREEDY, use_tqdm=False)
    wide_llm.reset_prefix_cache()
    wide_llm.engine.take_reports()
    monkeypatch.setattr(Runner, "step_sizes", StepSizes(((8, 8), (16, 8), (32, 16), (64, 32)), overhead))
    cut = wide_llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [report.num_prefill for report in wide_llm.engine.take_reports() if report.num_prefill] == lengths
    assert [one.outputs[0].token_ids for one in cut] == [one.outputs[0].token_ids for one in whole]


def test_the_bar_shows_rates(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "20/20" in shown and "input" in shown and "output" in shown and "tok/s" in shown
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
