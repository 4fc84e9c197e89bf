"""Why a completion ends, and exactly where."""

from dataclasses import replace

import pytest

from jaxvllm import LLM, CompletionOutput, SamplingParams
from tests.engine.tiny import GREEDY, MAX_MODEL_LEN, few_pages

PROMPT = [40, 41, 42, 43]
# Nearly uniform over some 300 tokens: among 32 completions of 100 tokens, several draw EOS.
WILD = SamplingParams(temperature=20.0, seed=1, n=32, max_tokens=100)
IGNORING = replace(WILD, ignore_eos=True)


def complete(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> CompletionOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    [completion] = output.outputs
    return completion


def end(completion: CompletionOutput) -> tuple[str | None, int | str | None]:
    return completion.finish_reason, completion.stop_reason


def completions(llm: LLM, params: SamplingParams) -> list[CompletionOutput]:
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs


@pytest.fixture(scope="module")
def wild(shared_llm: LLM) -> list[CompletionOutput]:
    return completions(shared_llm, WILD)


@pytest.fixture(scope="module")
def ignoring(shared_llm: LLM) -> list[CompletionOutput]:
    return completions(shared_llm, IGNORING)


def test_eos(llm: LLM, wild: list[CompletionOutput]) -> None:
    tokenizer = llm.get_tokenizer()
    eos = tokenizer.eos_token_id
    ended = [c for c in wild if c.finish_reason == "stop"]
    assert 5 <= len(ended) < 28
    for completion in wild:
        tokens = completion.token_ids
        if completion.finish_reason == "stop":
            assert tokens.index(eos) == len(tokens) - 1
            assert completion.stop_reason is None
            assert completion.text == tokenizer.decode(tokens[:-1])
        else:
            assert end(completion) == ("length", None) and len(tokens) == 100 and eos not in tokens


def test_ignore_eos_goes_on_with_the_same_tokens(
    llm: LLM, wild: list[CompletionOutput], ignoring: list[CompletionOutput]
) -> None:
    eos = llm.get_tokenizer().eos_token_id
    for one, other in zip(wild, ignoring, strict=True):
        assert len(other.token_ids) == 100
        assert other.token_ids[: len(one.token_ids)] == one.token_ids
    assert any(eos in completion.token_ids[:-1] for completion in ignoring)


def test_min_tokens_forbids_an_eos_that_is_ignored(llm: LLM, ignoring: list[CompletionOutput]) -> None:
    """As in vLLM: a model that ends goes on with something else, as it would after its end."""
    eos = llm.get_tokenizer().eos_token_id
    held = completions(llm, replace(IGNORING, min_tokens=50))
    assert any(eos in completion.token_ids[:50] for completion in ignoring)
    assert not any(eos in completion.token_ids[:50] for completion in held)
    assert any(eos in completion.token_ids[50:] for completion in held)


def test_eos_is_no_stop_token_unless_it_is_ignored(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    assert eos is not None
    for ignored, reason in ((False, None), (True, eos)):
        params = replace(WILD, stop_token_ids=[eos], ignore_eos=ignored)
        assert {end(completion) for completion in completions(llm, params)} == {("stop", reason), ("length", None)}


def test_min_tokens_forbids_eos_and_stop_tokens(llm: LLM, wild: list[CompletionOutput]) -> None:
    eos = llm.get_tokenizer().eos_token_id
    held = completions(llm, replace(WILD, min_tokens=50))
    assert any(len(completion.token_ids) <= 50 for completion in wild)
    assert all(len(completion.token_ids) > 50 and eos not in completion.token_ids[:50] for completion in held)
    greedy = complete(llm, GREEDY).token_ids
    stop = greedy[3]
    params = replace(GREEDY, stop_token_ids=[stop], min_tokens=10)
    tokens = complete(llm, params).token_ids
    assert tokens[:3] == greedy[:3] and stop not in tokens[:10]


def test_stop_token_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    greedy = complete(llm, GREEDY).token_ids
    stop = greedy[9]
    expected = greedy[: greedy.index(stop) + 1]
    for params in (replace(GREEDY, stop_token_ids=[1, stop]), replace(GREEDY, stop_token_ids=[stop], logprobs=0)):
        completion = complete(llm, params)
        assert completion.token_ids == expected
        assert end(completion) == ("stop", stop)
        assert completion.text == tokenizer.decode(expected[:-1])
    shown = complete(llm, replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=True))
    assert shown.token_ids == expected and shown.text == tokenizer.decode(expected)


def stop_over_a_border(llm: LLM) -> tuple[SamplingParams, list[int], str, str]:
    """Parameters whose text has two clean letters with a token border between: tokens, text and these letters."""
    tokenizer = llm.get_tokenizer()
    for seed in range(100):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
        completion = complete(llm, params)
        for count in range(8, 40):
            before = tokenizer.decode(completion.token_ids[:count])
            stop = completion.text[len(before) - 1 : len(before) + 1]
            if completion.text.startswith(before) and len(stop) == 2 and stop.isascii() and stop.isprintable():
                if completion.text.find(stop) == len(before) - 1:
                    return params, completion.token_ids, completion.text, stop
    raise AssertionError("no such text in 100 tries")


@pytest.mark.parametrize("scarce", [False, True])
def test_stop_strings(llm: LLM, scarce: bool) -> None:
    tokenizer = llm.get_tokenizer()
    params, tokens, text, stop = stop_over_a_border(llm)
    at = text.find(stop)
    count = next(i for i in range(len(tokens)) if stop in tokenizer.decode(tokens[:i]))
    with few_pages(llm, 8 if scarce else 64):
        cut = complete(llm, replace(params, stop=["nowhere in it", stop]))
        shown = complete(llm, replace(params, stop=stop, include_stop_str_in_output=True))
        late = complete(llm, replace(params, stop=stop, min_tokens=count))
    assert cut.token_ids == shown.token_ids == tokens[:count]
    assert end(cut) == end(shown) == ("stop", stop)
    assert cut.text == text[:at]
    assert shown.text == text[: at + len(stop)]
    assert late.token_ids[: count + 1] == tokens[: count + 1]


def test_what_looks_like_a_stop_string_at_the_end_is_given_back(llm: LLM) -> None:
    params, tokens, text, stop = stop_over_a_border(llm)
    tail = text[-2:]
    completion = complete(llm, replace(params, stop=[tail + "never"]))
    assert completion.text == text and end(completion) == ("length", None)


def test_a_stop_string_ends_its_own_completion_only(llm: LLM) -> None:
    params, _, text, stop = stop_over_a_border(llm)
    several = replace(params, n=4)
    free = llm.generate([PROMPT], several, use_tqdm=False)[0].outputs
    cut = llm.generate([PROMPT], replace(several, stop=stop), use_tqdm=False)[0].outputs
    assert [c.text for c in cut] == [c.text.partition(stop)[0] for c in free]
    assert [c.stop_reason for c in cut] == [stop if stop in c.text else None for c in free]


def test_max_tokens_and_max_model_len(llm: LLM) -> None:
    for count in (1, 2, 17):
        completion = complete(llm, replace(GREEDY, max_tokens=count))
        assert len(completion.token_ids) == count and end(completion) == ("length", None)
    for length in (1, 100, MAX_MODEL_LEN - 1):
        for limit in (None, 10**6):
            completion = complete(llm, replace(GREEDY, max_tokens=limit), [9] * length)
            assert length + len(completion.token_ids) == MAX_MODEL_LEN and end(completion) == ("length", None)
