"""Bad input is a ValueError that names the rule, before anything is queued; the engine serves on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import LLM, EngineConfig, SamplingParams
from jaxvllm.core.errors import ContextLengthError
from tests.engine.tiny import GREEDY, MAX_MODEL_LEN, assert_idle, few_pages, greedy_tokens, tiny_llm

GOOD = [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty: give at least one character"),
        ([[]], "the prompt is empty: give at least one token"),
        ([-1, 5], "token id -1 is outside the vocabulary of"),
        ([5, 10**6], "token id 1000000 is outside the vocabulary of"),
        ([[5, 2**40]], "token id 1099511627776 is outside the vocabulary of"),
        ([5] * MAX_MODEL_LEN, "prompt of 128 tokens leaves no room for an output within max_model_len 128: shorten it"),
        ("word " * 10**6, "prompt of 5000000 characters is more than .* tokens can be: shorten it"),
        ("word " * 100, "leaves no room for an output within max_model_len 128: shorten it"),
        ([[5.0, 6.0]], "must be a flat list of integers"),
        ([["a"]], "must be a flat list of integers"),
        ([True, False], "must be a flat list of integers"),
        ([None], "not NoneType"),
        ([b"bytes"], "not bytes"),
        ("\ud800", "valid Unicode"),
        ({"prompt": "a", "prompt_ids": [1]}, "unknown prompt fields"),
        ({"cache_salt": "a"}, "a prompt mapping needs"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a string"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
    ],
)
def test_a_bad_prompt(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert_idle(llm)
    several = [GOOD, *(prompt if isinstance(prompt, list) and isinstance(prompt[0], list) else [prompt])]
    with pytest.raises(ValueError, match="prompt 1: .*"):
        llm.generate(several, GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert len(greedy_tokens(llm, [GOOD])[0]) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_tokens=0), "max_tokens must be an integer from 1 .* not 0"),
        (dict(temperature=math.nan), "temperature must be a number from 0 .* not nan"),
        (dict(temperature=-0.1), "temperature must be a number from 0 .* not -0.1"),
        (dict(top_p=0), "top_p must be above 0"),
        (dict(top_p=1.5), "top_p must be a number from 0 to 1, not 1.5"),
        (dict(n=0), "n must be an integer from 1 .* not 0"),
        (dict(n=10**9), "n must be an integer from 1 .* not 1000000000"),
        (dict(stop=["x" + str(i) for i in range(10_000)]), "stop has 10000 strings, the limit is"),
        (dict(stop=[""]), "a stop string must have 1 to"),
        (dict(logprobs=-2), "logprobs must be an integer"),
        (dict(min_tokens=20), "min_tokens 20 exceeds max_tokens 16"),
    ],
)
def test_bad_sampling_params_never_exist(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("prompt", [[5] * 200, "word " * 10**6])
def test_a_prompt_that_is_too_long_says_by_how_much(llm: LLM, prompt: Any) -> None:
    num_chars = len(prompt) if isinstance(prompt, str) else 0
    num_tokens = -(-num_chars // llm.get_tokenizer().longest_token) if num_chars else len(prompt)
    for prompts, start in (([prompt], "prompt of"), ([GOOD, prompt], "prompt 1: prompt of")):
        with pytest.raises(ContextLengthError, match=start) as raised:
            llm.generate(prompts, GREEDY, use_tqdm=False)
        error = raised.value
        assert (error.num_tokens, error.num_chars) == (num_tokens, num_chars)
        assert (error.max_model_len, error.max_prompt_tokens) == (128, 127)


def test_a_request_larger_than_the_pool(tiny_checkpoint: Path) -> None:
    with tiny_llm(tiny_checkpoint, num_pages=5) as llm:
        with pytest.raises(ValueError, match="needs 5 pages of 16 tokens, but the pool has 4: lower max_tokens"):
            llm.generate([GOOD, [5] * 60], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        assert_idle(llm)
        with pytest.raises(ValueError, match="but the pool has 4"):
            llm.generate([GOOD], SamplingParams(max_tokens=None), use_tqdm=False)
        # What just fits is served: the last token needs no KV.
        [output] = llm.generate(
            [[5] * 60], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 5
        assert_idle(llm)


def test_lists_that_do_not_match(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        llm.generate([GOOD, GOOD], [GREEDY] * 3, use_tqdm=False)
    with pytest.raises(ValueError, match="1 priority for 2 prompts"):
        llm.generate([GOOD, GOOD], GREEDY, priority=[1], use_tqdm=False)
    with pytest.raises(ValueError, match="priority must be an integer, not None"):
        llm.generate([GOOD], GREEDY, priority=[None], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="must be SamplingParams, not dict"):
        llm.generate([GOOD], [{"temperature": 0}], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="priority 1 needs an engine with scheduling_policy='priority'"):
        llm.generate([GOOD], GREEDY, priority=[1], use_tqdm=False)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_request_id_in_use(llm: LLM) -> None:
    engine = llm.engine
    engine.submit(engine.check("twice", GOOD, GREEDY))
    with pytest.raises(ValueError, match="request id 'twice' is in use: choose another"):
        engine.submit(engine.check("twice", GOOD, GREEDY))
    assert engine.abort("twice") is not None
    assert engine.abort("twice") is None


@pytest.mark.parametrize("names", [("a", "a#0"), ("a#0", "a")])
def test_an_id_that_one_of_several_completions_has(llm: LLM, names: tuple[str, str]) -> None:
    engine = llm.engine
    params = {"a": replace(GREEDY, n=2), "a#0": GREEDY}
    engine.submit(engine.check(names[0], GOOD, params[names[0]]))
    with pytest.raises(ValueError, match="request id 'a#0' is in use: choose another"):
        engine.submit(engine.check(names[1], GOOD, params[names[1]]))
    finished = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == [names[0]]


def test_bad_messages(llm: LLM) -> None:
    for messages in ([{"content": "no role"}], [{"role": "user", "content": 5}]):
        with pytest.raises(ValueError, match="message|role|content"):
            llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(max_num_seq=4), TypeError, "unknown option 'max_num_seq': did you mean 'max_num_seqs'"),
        (dict(pages_size=16), TypeError, "did you mean 'page_size'"),
        (dict(meshs=2), TypeError, "did you mean 'mesh'"),
        (dict(memory_utilisation=0.5), TypeError, "did you mean 'memory_utilization'"),
        (dict(enforce_lazy=True), TypeError, "unknown option 'enforce_lazy'"),
        (dict(mesh="axb"), ValueError, "mesh 'axb' is not DxM: write replicas x devices of each"),
        (dict(mesh="0x1"), ValueError, "mesh 0x1 has an empty axis"),
        (dict(mesh=8), ValueError, "mesh '8' is not DxM"),
        (dict(page_size=17), ValueError, "page_size must be one of"),
        (dict(dtype="int8"), ValueError, "dtype must be one of"),
        (dict(scheduler="v2"), ValueError, "scheduler must be one of static, continuous, v0, v1, not 'v2'"),
        (dict(reasoning_parser="x"), ValueError, "reasoning_parser must be one of .*qwen3.*, not 'x'"),
        (dict(max_num_seqs=0), ValueError, "max_num_seqs must be an integer from 1 to 1048576, not 0"),
        (dict(memory_utilization=1.5), ValueError, "memory_utilization must be a number from 0.001 to 1, not 1.5"),
    ],
)
def test_engine_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig.from_options(**options)
    with pytest.raises(error, match=message):
        LLM(**options)


def test_options_that_contradict_the_model(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 4 must be at least max_num_seqs 8"):
        tiny_llm(tiny_checkpoint, max_num_batched_tokens=4, token_buckets=None)
    with pytest.raises(ValueError, match="row_buckets .* go beyond 8"):
        tiny_llm(tiny_checkpoint, row_buckets=(16,))
    with pytest.raises(ValueError, match="is not a directory"):
        tiny_llm(tiny_checkpoint / "missing")


def test_a_request_that_needs_every_page_left_is_served(llm: LLM) -> None:
    """Pages in use make a request wait; they are no reason to refuse it."""
    with few_pages(llm, 8):
        assert len(greedy_tokens(llm, [[5] * 100])[0]) == GREEDY.max_tokens
