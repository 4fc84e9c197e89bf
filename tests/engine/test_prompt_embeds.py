"""Prompts of embeddings: the table's rows for some tokens give what these tokens give, in every way that there is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxvllm import LLM, EngineConfig, SamplingParams
from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.errors import ContextLengthError, ParameterError
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.side_input import SideInput
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine.exported_request import ExportedRequest
from jaxvllm.engine.outputs import RequestOutput
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.engine.resolved_config import ResolvedConfig
from tests.engine.tiny import GREEDY, assert_idle, few_pages, one_program, random_prompts, tiny_llm
from tests.models.fixture import Fixture

PROMPTS = random_prompts(5, longest=60, seed=3)
SHORT = replace(GREEDY, max_tokens=8)


def start(checkpoint: Path, **options: Any) -> LLM:
    """16 tokens a step, so that a prompt takes several steps."""
    with one_program():
        return tiny_llm(checkpoint, enable_prompt_embeds=True, speculation=False, **options)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[LLM]:
    with start(tiny_checkpoint) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    engine.reset_prefix_cache()
    yield engine
    assert_idle(engine)
    replica = engine.engine.replicas[0]
    assert not replica.scheduler.side_store.num_held
    assert np.asarray(replica.runner._state["history"]).min() >= 0, "what reads tokens would read a row's number"


def table(llm: LLM) -> NDArray[np.float32]:
    return np.asarray(llm.weights["embed"])


def embeds(llm: LLM, ids: Sequence[int]) -> dict[str, Any]:
    return {"prompt_embeds": table(llm)[list(ids)]}


def ask(llm: LLM, prompts: Sequence[Any], params: SamplingParams = SHORT) -> list[RequestOutput]:
    return llm.generate(list(prompts), params, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def count_fills(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Adds to the list how many rows each admission fills."""
    filled: list[int] = []
    scheduler = llm.engine.replicas[0].scheduler
    take = scheduler.side_store.take

    def counted(*given: Any) -> Any:
        rows = take(*given)
        filled.append(sum(len(one.rows) for one in rows))
        return rows

    monkeypatch.setattr(scheduler.side_store, "take", counted)
    return filled


def test_rows_of_the_table_give_what_their_tokens_give(llm: LLM) -> None:
    assert_tokens_of_mixed_prompts(llm)


def test_stages_of_several_devices_have_the_rows_too(tiny_checkpoint: Path) -> None:
    with start(tiny_checkpoint, mesh="2x1x2") as llm:
        assert_tokens_of_mixed_prompts(llm)
        assert_idle(llm)


def assert_tokens_of_mixed_prompts(llm: LLM) -> None:
    """In chunks, several in one batch with prompts of tokens, and again from cached prefixes."""
    expected = ask(llm, PROMPTS)
    mixed = [prompt if i % 2 else embeds(llm, prompt) for i, prompt in enumerate(PROMPTS)]
    llm.reset_prefix_cache()
    for turn in range(2):
        outputs = ask(llm, mixed)
        assert tokens(outputs) == tokens(expected)
        whole_pages = [(len(prompt) - 1) // 16 * 16 if turn else 0 for prompt in PROMPTS]
        assert [output.num_cached_tokens for output in outputs] == whole_pages
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert outputs[0].prompt is None and outputs[0].prompt_token_ids == [0] * len(PROMPTS[0])


def test_other_rows_share_no_page_but_those_of_an_equal_beginning(llm: LLM) -> None:
    ids = PROMPTS[1] * 3
    rows = table(llm)[ids[:60]]
    ask(llm, [{"prompt_embeds": rows}])
    other = rows.copy()
    other[35, 0] += 0.5
    assert ask(llm, [{"prompt_embeds": other}])[0].num_cached_tokens == 32
    other[0, 0] += 0.5
    assert ask(llm, [{"prompt_embeds": other}])[0].num_cached_tokens == 0
    assert ask(llm, [ids[:60]])[0].num_cached_tokens == 0, "tokens are not embeddings"
    assert ask(llm, [[0] * 60])[0].num_cached_tokens == 0, "and placeholders are no tokens"
    assert ask(llm, [{"prompt_embeds": rows, "cache_salt": "mine"}])[0].num_cached_tokens == 0
    assert ask(llm, [{"prompt_embeds": rows}])[0].num_cached_tokens == 48


def test_completions_of_one_prompt_share_rows_and_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=6, ignore_eos=True, logprobs=2)
    expected = ask(llm, [PROMPTS[1]], sampled)
    filled = count_fills(llm, monkeypatch)
    outputs = ask(llm, [embeds(llm, PROMPTS[1])], sampled)
    assert tokens(outputs) == tokens(expected)
    assert sum(filled) == len(PROMPTS[1]), "rows were sent more than once"


def test_preempted_requests_find_their_rows_again(llm: LLM) -> None:
    prompts = [(prompt * 4)[:40] for prompt in PROMPTS]
    expected = ask(llm, prompts, GREEDY)
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, 10):
        outputs = ask(llm, [embeds(llm, prompt) for prompt in prompts], GREEDY)
    assert llm.engine.stats().num_preemptions > before
    assert tokens(outputs) == tokens(expected)


def test_more_rows_than_there_are_wait_for_each_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has 128 rows, and these prompts 300."""
    prompts = [[*prompt, *random_prompts(1, 60, seed)[0], *range(2, 50)][:60] for seed, prompt in enumerate(PROMPTS)]
    expected = ask(llm, prompts)
    filled = count_fills(llm, monkeypatch)
    store, most = llm.engine.replicas[0].scheduler.side_store, 0
    for prompt in prompts:
        llm.engine.submit(llm.engine.check(str(prompt[:3]), embeds(llm, prompt), SHORT))
    outputs: dict[str, RequestOutput] = {}
    while llm.engine.has_work:
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
        llm.engine.replicas[0].scheduler.check_invariants()
        most = max(most, store.num_held)
    assert 60 < most <= store.num_rows == 128 and filled == [60] * 5
    assert tokens([outputs[str(prompt[:3])] for prompt in prompts]) == tokens(expected)


def test_side_inputs_in_the_middle_of_tokens(llm: LLM) -> None:
    """As features of images will be: two ranges of a prompt of tokens, which begin and end within pages and chunks."""
    ids = np.array((PROMPTS[1] * 3)[:50], np.int32)
    [expected] = ask(llm, [ids.tolist()])
    sides = tuple(SideInput.of(first, table(llm)[ids[first:end]]) for first, end in ((3, 21), (30, 38)))
    placed = ids.copy()
    for side in sides:
        placed[side.first : side.end] = 0
    for number in range(2):
        request = GenerationRequest(f"middle-{number}", Prompt(None, placed, None, sides), SHORT)
        llm.engine.inputs.rules.check(request)
        llm.engine.submit(request)
        while llm.engine.has_work:
            outputs = llm.engine.step()
        assert tokens(outputs) == tokens([expected])
        assert outputs[0].num_cached_tokens == 48 * number


def test_penalties_and_guesses_see_no_placeholder(llm: LLM) -> None:
    """Token 0 is the likeliest here, so a penalty for the placeholders would keep it away."""
    ids = PROMPTS[1]
    params = replace(SHORT, logit_bias={0: 100.0}, repetition_penalty=1e6, max_tokens=1)
    assert tokens(ask(llm, [embeds(llm, ids)], params)) == [[[0]]]
    assert tokens(ask(llm, [[*ids, 0]], params)) != [[[0]]]
    constrained = replace(SHORT, structured_outputs=StructuredOutputsParams(choice=["abcab", "bcabc"]))
    assert tokens(ask(llm, [embeds(llm, ids)], constrained)) == tokens(ask(llm, [ids], constrained))


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "jax"])
def test_arrays_of_any_float_dtype_and_of_jax(llm: LLM, dtype: str) -> None:
    rows = jnp.asarray(table(llm)[PROMPTS[0]], jnp.bfloat16).astype(jnp.float32)
    given = rows if dtype == "jax" else np.asarray(rows).astype(dtype if dtype != "bfloat16" else jnp.bfloat16)
    [a, b] = ask(llm, [{"prompt_embeds": given}, {"prompt_embeds": np.asarray(rows)}])
    assert dtype == "float16" or a.outputs[0].token_ids == b.outputs[0].token_ids


def test_a_vector_of_embeddings(llm: LLM) -> None:
    [a] = llm.embed([PROMPTS[1]], use_tqdm=False)
    [b] = llm.embed([embeds(llm, PROMPTS[1])], use_tqdm=False)
    np.testing.assert_allclose(a.outputs.embedding, b.outputs.embedding, atol=1e-5)


def test_what_is_wrong_is_refused_before_anything_is_queued(llm: LLM) -> None:
    rows = table(llm)[PROMPTS[0]]
    width = rows.shape[1]
    cases: list[tuple[Any, SamplingParams, str]] = [
        (rows[:, :-1], SHORT, f"{width - 1} values in a row, and the hidden state of this model has {width}"),
        (rows[:0], SHORT, "is empty: give at least one row"),
        (rows[0], SHORT, "not float32 of shape"),
        (rows.astype(np.int32), SHORT, "must be an array of floats"),
        (np.where(np.arange(width) == 2, np.nan, rows), SHORT, "value 2 of row 0 is nan, and all must be finite"),
        ("rows", SHORT, "must be an array of floats"),
        ([[0.0], [0.0, 1.0]], SHORT, "must be an array that NumPy can read"),
        (np.zeros((128, width)), SHORT, "prompt of 128 tokens leaves no room"),
        (rows, replace(SHORT, prompt_logprobs=1), "prompt_logprobs is for prompts of tokens"),
    ]
    for value, params, words in cases:
        with pytest.raises(ValueError, match=words) as told:
            ask(llm, [PROMPTS[0], {"prompt_embeds": value}], params)
        assert isinstance(told.value, ParameterError | ContextLengthError)
        assert not llm.engine.has_work
    with pytest.raises(ValueError, match="prompt_embeds is a whole prompt, and prompt is another"):
        ask(llm, [{"prompt_embeds": rows, "prompt": "a"}])
    with pytest.raises(ValueError, match="unknown prompt fields"):
        ask(llm, [{"prompt_embeds": rows, "embeds": rows}])
    with pytest.raises(ValueError, match="explain is for prompts of tokens"):
        llm.engine.check("explained", {"prompt_embeds": rows}, SHORT, wants_explanation=True)
    with pytest.raises(ValueError, match="use_beam_search is for prompts of tokens"):
        llm.beam_search([{"prompt_embeds": rows}], BeamSearchParams(beam_width=2, max_tokens=2))


def test_only_the_last_rows_of_a_prompt_may_be_kept(llm: LLM) -> None:
    [a] = ask(llm, [embeds(llm, PROMPTS[1])], replace(SHORT, truncate_prompt_tokens=7))
    [b] = ask(llm, [PROMPTS[1][-7:]])
    assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_a_request_with_side_inputs_moves_to_another_engine(llm: LLM) -> None:
    [expected] = ask(llm, [PROMPTS[1]])
    llm.reset_prefix_cache()
    llm.engine.submit(llm.engine.check("moves", embeds(llm, PROMPTS[1]), SHORT))
    for _ in range(2):
        llm.engine.step()
    exported = ExportedRequest.from_bytes(llm.engine.export_request("moves").to_bytes())
    llm.reset_prefix_cache()
    llm.engine.import_request(exported)
    while llm.engine.has_work:
        outputs = llm.engine.step()
    assert tokens(outputs) == tokens([expected])


def test_an_engine_without_a_store_refuses() -> None:
    rules, prompt = RequestRules.of(EngineConfig(), 128, (), 256), Prompt(None, np.zeros(1, np.int32))
    rules.check(GenerationRequest("tokens", prompt, SHORT))
    prompt = replace(prompt, side_inputs=(SideInput.of(0, np.zeros((1, 2))),))
    with pytest.raises(ParameterError, match=r"prompt_embeds needs an engine .* \(--enable-prompt-embeds\)"):
        rules.check(GenerationRequest("embeds", prompt, SHORT))


def test_engines_that_cannot_are_refused_at_the_start() -> None:
    with pytest.raises(NotImplementedError, match="enable_prompt_embeds lets prompts have no tokens, and drafts of a"):
        EngineConfig(enable_prompt_embeds=True, speculative_config='{"method": "mtp", "num_speculative_tokens": 1}')
    EngineConfig(enable_prompt_embeds=True, speculative_config='{"method": "ngram", "num_speculative_tokens": 1}')
    small = Fixture.load("gemma4").config
    with pytest.raises(NotImplementedError, match="without embeddings for each layer"):
        ResolvedConfig.of(EngineConfig(enable_prompt_embeds=True), small, "cpu")
