"""`/v1/completions`: what a client gets, whole and streamed, and what it is refused."""

import json
import math
import socket
from typing import Any

import pytest

from jaxvllm import BeamSearchParams
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.protocol.completions import CompletionResponse
from tests.server.conftest import Server
from tests.server.judges import judge
from tests.waiting import wait_until

PATH = "/v1/completions"
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = dict(prompt=PROMPT, temperature=0, max_tokens=12)
LONG: dict[str, Any] = dict(prompt=PROMPT, temperature=0, max_tokens=400, ignore_eos=True)
# Five times as many as run at once: it does not end before a test has looked at it.
ENDLESS = LONG | dict(n=40)


def complete(server: Server, **body: Any) -> Any:
    answer = server.answer(PATH, **body)
    CompletionResponse.model_validate(answer)
    judge("openai.types.Completion").validate_python(answer)
    return answer


def scored(server: Server, **body: Any) -> Any:
    """The same where a prompt is scored: OpenAI's model knows no token without a probability, its API has one."""
    answer = server.answer(PATH, **body)
    CompletionResponse.model_validate(answer)
    return answer


def stream(server: Server, **body: Any) -> list[Any]:
    """The chunks of a stream that ended well."""
    events = server.events(PATH, **body)
    assert events.pop().data == "[DONE]"
    for event in events:
        assert event.name is None
        CompletionResponse.model_validate(event.data)
    return [event.data for event in events]


def joined(chunks: list[Any], field: str = "text") -> dict[int, Any]:
    """The pieces of each choice, put together."""
    whole: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            whole[index] = whole[index] + choice[field] if index in whole else choice[field]
    return whole


def test_a_completion(server):
    answer = complete(server, **GREEDY)
    [choice] = answer["choices"]
    assert (answer["model"], answer["object"]) == ("demo", "text_completion")
    assert answer["service_tier"] is None and answer["system_fingerprint"].startswith("fp_")
    assert answer["id"].startswith("cmpl-")
    assert choice["text"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_says_the_same(server):
    whole = complete(server, **GREEDY)
    chunks = stream(server, **GREEDY)
    assert joined(chunks) == {0: whole["choices"][0]["text"]}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_at_the_end_of_a_stream(server):
    chunks = stream(server, **GREEDY, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(server, **GREEDY, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_without_speculation_no_text_is_a_draft(server):
    body = GREEDY | dict(prompt=[PROMPT, "The sun"], n=2, temperature=1.0, seed=7, echo=True)
    chunks = stream(server, **body, stream_options={"include_draft_spans": True})
    told: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert not any(span["accepted"] for span in choice["draft_spans"])
            told.setdefault(choice["index"], "")
            told[choice["index"]] += "".join(span["text"] for span in choice["draft_spans"])
    prompts = [PROMPT, PROMPT, "The sun", "The sun"]
    assert joined(chunks) == {index: prompts[index] + text for index, text in told.items()}
    assert len(told) == 4 and all(told.values())


def test_max_tokens_is_16_without_a_word(server):
    assert complete(server, prompt=PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_several_choices_of_several_prompts(server):
    body = dict(prompt=[PROMPT, "The sun", "Tom and Lily"], n=2, seed=7, max_tokens=6, temperature=1.0)
    answer = complete(server, **body)
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert list(texts) == list(range(6))
    assert answer["usage"]["completion_tokens"] <= 36
    assert joined(stream(server, **body)) == texts
    alone = complete(server, **body | {"prompt": "The sun"})
    assert [choice["text"] for choice in alone["choices"]] == [texts[2], texts[3]]


def test_a_seed_repeats_and_another_does_not(server):
    body = dict(prompt=PROMPT, temperature=1.0, max_tokens=12)
    first, second, other = (complete(server, **body, seed=seed)["choices"][0]["text"] for seed in (3, 3, 4))
    assert first == second != other


def test_token_ids_are_a_prompt(server):
    tokens = server.answer("/tokenize", prompt=PROMPT)["tokens"]
    text = complete(server, **GREEDY)["choices"][0]["text"]
    assert complete(server, **GREEDY | {"prompt": tokens})["choices"][0]["text"] == text
    both = complete(server, **GREEDY | {"prompt": [tokens, tokens]})["choices"]
    assert [choice["text"] for choice in both] == [text, text]


def test_special_tokens_are_added_unless_refused(server):
    with_them, without = (
        complete(server, **GREEDY, add_special_tokens=added)["usage"]["prompt_tokens"] for added in (True, False)
    )
    assert with_them == without + 1


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(server, count):
    answer = complete(server, **GREEDY, logprobs=count)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 12
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    for token, own, best in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert best[token] == own == max(best.values())  # greedy
        assert len(best) == max(count, 1)
        assert sum(map(math.exp, best.values())) <= 1.0001
    chunks = stream(server, **GREEDY, logprobs=count)
    for field in logprobs:
        parts = [chunk["choices"][0]["logprobs"][field] for chunk in chunks]
        joined_up = sum(parts, [])
        if field == "top_logprobs":  # one table a token
            assert [table.keys() for table in joined_up] == [table.keys() for table in logprobs[field]]
            joined_up = [list(table.values()) for table in joined_up]
            assert joined_up == [pytest.approx(list(table.values())) for table in logprobs[field]]
        else:
            assert joined_up == pytest.approx(logprobs[field])


def test_logprobs_of_text_that_is_held_back(server):
    """A stop string that nearly comes keeps text back, and the offsets of a stream are still those of the whole."""
    text = complete(server, **GREEDY)["choices"][0]["text"]
    body = GREEDY | dict(logprobs=0, stop=text[4:9] + "#")
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in stream(server, **body)]
    assert sum(offsets, []) == complete(server, **body)["choices"][0]["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(allowed_token_ids=[300, 301]), {300, 301}),
        (dict(logit_bias={"300": 100}), {300}),
        (dict(allowed_token_ids=[300, 301], presence_penalty=2, logit_bias={"301": 100}), {301}),
    ],
)
def test_which_tokens_may_come(server, options, expected):
    [choice] = complete(server, **GREEDY, return_token_ids=True, **options)["choices"]
    assert set(choice["token_ids"]) <= expected


def test_bad_words_and_penalties_change_the_text(server):
    [plain] = complete(server, **LONG | dict(max_tokens=60))["choices"]
    assert "Lola" in plain["text"]
    [without] = complete(server, **LONG | dict(max_tokens=60), bad_words=["Lola"])["choices"]
    assert "Lola" not in without["text"]
    [varied] = complete(server, **LONG | dict(max_tokens=60), repetition_penalty=1.5, frequency_penalty=1)["choices"]
    assert len({plain["text"], without["text"], varied["text"]}) == 3


def test_logprobs_of_named_tokens(server):
    named = dict(logprob_token_ids=[300, 301], return_tokens_as_token_ids=True)
    [choice] = complete(server, **GREEDY, **named)["choices"]
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert set(top) == {token, "token_id:300", "token_id:301"}


def test_tokens_by_their_ids(server):
    answer = complete(server, **GREEDY, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["prompt_token_ids"] == server.answer("/tokenize", prompt=PROMPT)["tokens"]
    assert server.answer("/detokenize", tokens=choice["token_ids"])["prompt"] == choice["text"]
    chunks = stream(server, **GREEDY, return_token_ids=True)
    assert joined(chunks, "token_ids") == {0: choice["token_ids"]}


def test_echo(server):
    text = complete(server, **GREEDY)["choices"][0]["text"]
    tokens = server.answer("/tokenize", prompt=PROMPT)["tokens"]
    assert complete(server, **GREEDY, echo=True)["choices"][0]["text"] == PROMPT + text
    assert joined(stream(server, **GREEDY, echo=True)) == {0: PROMPT + text}
    assert complete(server, **GREEDY | {"prompt": tokens}, echo=True)["choices"][0]["text"] == PROMPT + text


def test_echo_with_logprobs_tells_those_of_the_prompt(server):
    tokens = server.answer("/tokenize", prompt=PROMPT)["tokens"]
    [alone] = scored(server, **GREEDY, logprobs=2)["choices"]
    body = GREEDY | dict(echo=True, logprobs=2, n=2, return_token_ids=True)
    answer = scored(server, **body)
    choices = {choice["index"]: choice for choice in answer["choices"]}
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    logprobs = choices[0]["logprobs"]
    count = len(tokens)
    assert "".join(logprobs["tokens"][1:]) == PROMPT + alone["text"]  # after the one that begins all texts
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][count:] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
    for token, own, best in list(
        zip(*(logprobs[f] for f in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert best[token] == own <= max(best.values()) and 2 <= len(best) <= 3
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert answer["usage"]["prompt_tokens"] == count and answer["usage"]["completion_tokens"] == 24
    chunks = [chunk["choices"][0] for chunk in stream(server, **body)]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert sum((chunk["logprobs"]["tokens"] for chunk in own), []) == logprobs["tokens"]
        assert sum((chunk["logprobs"]["text_offset"] for chunk in own), []) == logprobs["text_offset"]
        assert [chunk.get("prompt_token_ids") for chunk in own] == [tokens] + [None] * (len(own) - 1)


def test_echo_with_logprobs_of_named_tokens(server):
    body = GREEDY | dict(echo=True, logprob_token_ids=[300, 400])
    [plain] = scored(server, **GREEDY, echo=True, logprobs=0)["choices"]
    [choice] = scored(server, **body)["choices"]
    count = len(server.answer("/tokenize", prompt=PROMPT)["tokens"])
    assert choice["text"] == plain["text"]
    assert choice["logprobs"]["tokens"] == plain["logprobs"]["tokens"]
    assert choice["logprobs"]["token_logprobs"][1:count] == plain["logprobs"]["token_logprobs"][1:count]
    assert [len(best) for best in choice["logprobs"]["top_logprobs"][1:count]] == [1] * (count - 1)
    assert {len(best) for best in choice["logprobs"]["top_logprobs"][count:]} <= {2, 3}
    assert "".join(joined(stream(server, **body)).values()) == choice["text"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json": {"const": "<tool_call>"}}, '"<tool_call>"'),
        ({"regex": "<tool_call>ab</tool_call>"}, "<tool_call>ab</tool_call>"),
        ({"choice": ["<|end|>"]}, "<|end|>"),
        ({"choice": ["a<|user|>b"]}, "a<|user|>b"),
    ],
)
@pytest.mark.parametrize("skips", [True, False])
def test_a_form_with_the_spelling_of_an_added_token(server, form: dict[str, Any], text: str, skips: bool) -> None:
    body = dict(prompt="x", max_tokens=20, structured_outputs=form, skip_special_tokens=skips)
    [choice] = complete(server, **body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert joined(stream(server, **body)) == {0: text}


def test_a_form_that_the_allowed_tokens_cannot_write(server):
    [a, b] = (server.answer("/tokenize", prompt=text, add_special_tokens=False)["tokens"][0] for text in "ab")
    body = dict(prompt="x", max_tokens=20, structured_outputs={"regex": "[ab]{3}c"})
    for allowed, is_streamed in (([300, 301], False), ([300, 301], True), ([a, b], False)):
        refused = server.post(PATH, **body, allowed_token_ids=allowed, stream=is_streamed)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allowed_token_ids")
    assert "behind 3 tokens" in refused.json()["error"]["message"]
    *_, error, done = server.events(PATH, **body, allowed_token_ids=[a, b])
    assert (error.name, error.data["error"]["param"], done.data) == ("error", "allowed_token_ids", "[DONE]")


def test_a_prompt_is_scored_and_nothing_generated(server):
    """What evaluations ask: the log-likelihood of a text."""
    prompts = [PROMPT, "The sun"]
    told = scored(server, prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0)
    more = scored(server, prompt=prompts, max_tokens=3, echo=True, logprobs=1, temperature=0)
    for prompt, choice, longer in zip(prompts, told["choices"], more["choices"], strict=True):
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (prompt, "length", None)
        values = choice["logprobs"]["token_logprobs"]
        assert values[0] is None
        assert values[1:] == pytest.approx(longer["logprobs"]["token_logprobs"][1 : len(values)], abs=1e-4)
    assert told["usage"]["completion_tokens"] == 0
    chunks = stream(server, prompt=prompts, max_tokens=0, echo=True)
    assert joined(chunks) == dict(enumerate(prompts))
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {"length"}


def test_a_prompt_of_the_models_length_is_scored(server):
    """Nothing is generated, so that no room is needed after it."""
    tokens = server.answer("/tokenize", prompt="word " * 600)["tokens"][:512]
    body: dict[str, Any] = dict(prompt=tokens, max_tokens=0, temperature=0)
    told = scored(server, **body, echo=True, logprobs=1)
    [choice] = told["choices"]
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == 512
    assert (choice["finish_reason"], told["usage"]["completion_tokens"]) == ("length", 0)
    [shorter] = scored(server, **body | {"prompt": tokens[:511]}, echo=True, logprobs=1)["choices"]
    assert values[1:511] == pytest.approx(shorter["logprobs"]["token_logprobs"][1:], abs=1e-4)
    [plain] = scored(server, **body, prompt_logprobs=0)["choices"]
    assert (plain["text"], len(plain["prompt_logprobs"])) == ("", 512)
    assert scored(server, **body, echo=True)["choices"][0]["text"] == choice["text"]
    [chunk] = stream(server, **body, echo=True, logprobs=1)
    assert chunk["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(values[1:], abs=1e-4)
    status, error = server.error(PATH, **body | {"prompt": [*tokens, 5]}, prompt_logprobs=0)
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_scores_of_several_choices_of_which_nothing_is_generated(server):
    choices = scored(server, prompt=[PROMPT, "The sun"], n=2, max_tokens=0, echo=True, logprobs=0)["choices"]
    assert [choice["text"] for choice in choices] == [PROMPT, PROMPT, "The sun", "The sun"]
    assert all(choice["logprobs"]["token_logprobs"][1] < 0 for choice in choices)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("word " * 600, "prompt"),
        ("word " * 10**6, "prompt"),
        ([5] * 512, "prompt"),
        ([[1], [5] * 10_000], "prompt[1]"),
        (["a", "b", "word " * 600], "prompt[2]"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_prompt_that_is_too_long(server, prompt, param):
    """Some clients look for these words, as OpenAI has them, and others for the code."""
    status, error = server.error(PATH, prompt=prompt)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
    assert error["param"] == param
    start = "This model's maximum context length is 512 tokens, and the prompt is too long: it has "
    assert error["message"].startswith(start)
    assert f"and the most is 511. Shorten {param}, or raise" in error["message"]


@pytest.mark.parametrize("tiny", [5e-324, 1e-46, 1e-45, 1e-39, 1.17e-38])
def test_floats_too_small_for_the_device(server, tiny):
    [greedy] = complete(server, **GREEDY)["choices"]
    for body in (dict(top_p=tiny), dict(temperature=tiny), dict(top_p=tiny, min_p=tiny, temperature=1e6)):
        [choice] = complete(server, **GREEDY | {"temperature": 1.0} | body)["choices"]
        assert choice["text"] == greedy["text"]
    free = dict(prompt=PROMPT, max_tokens=12, seed=7, temperature=1.0)
    assert complete(server, **free, min_p=tiny)["choices"] == complete(server, **free)["choices"]


@pytest.mark.parametrize("count", [0, 3, 25])
def test_prompt_logprobs(server, count):
    tokens = server.answer("/tokenize", prompt=PROMPT)["tokens"]
    for _ in range(2):  # what is cached is scored all the same
        [choice] = scored(server, **GREEDY, prompt_logprobs=count)["choices"]
        first, *scores = choice["prompt_logprobs"]
        assert first is None
        for token, told in zip(tokens[1:], scores, strict=True):
            assert next(iter(told)) == str(token) and len(told) in (max(count, 1), count + 1)
            assert set(told[str(token)]) == {"logprob", "rank", "decoded_token"}
            assert {entry["rank"] for entry in told.values()} >= set(range(1, count + 1))
    [same] = scored(server, **GREEDY | dict(max_tokens=0), logprobs=count, echo=True)["choices"]
    told = [{entry["logprob"] for entry in ranked.values()} for ranked in scores]
    assert [set(ranked.values()) for ranked in same["logprobs"]["top_logprobs"][1:]] == told
    echoed = scored(server, **GREEDY, prompt_logprobs=count, echo=True, logprobs=1)["choices"][0]
    assert [len(told) for told in echoed["prompt_logprobs"][1:]] == [len(told) for told in scores]


def test_a_stop_string(server):
    text = complete(server, **GREEDY)["choices"][0]["text"]
    stop = text[6:9]
    before = text[: text.index(stop)]
    [choice] = complete(server, **GREEDY, stop=stop)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    assert joined(stream(server, **GREEDY, stop=["never said", stop])) == {0: before}
    [choice] = complete(server, **GREEDY, stop=[stop], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == before + stop


def test_a_stop_token(server):
    tokens = complete(server, **GREEDY, return_token_ids=True)["choices"][0]["token_ids"]
    [choice] = complete(server, **GREEDY, stop_token_ids=[tokens[3]], return_token_ids=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[3])
    asked = GREEDY | dict(stop_token_ids=[tokens[0]], min_tokens=3, return_token_ids=True)
    [choice] = complete(server, **asked)["choices"]
    assert len(choice["token_ids"]) >= 3 and tokens[0] not in choice["token_ids"][:3]


def test_cached_tokens_and_who_shares_them(server):
    def cached(**body):
        usage = complete(server, **GREEDY | {"prompt": "A cat sat on a mat. " * 10}, **body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 16
    assert cached(cache_salt="two") == 0
    assert cached() == 0


def test_its_own_request_id(server):
    assert complete(server, **GREEDY, request_id="mine:1")["id"] == "mine:1"


# ---- refusals ----

BAD: list[tuple[dict[str, Any], str]] = [
    (dict(prompt=None), "prompt"),
    (dict(prompt=5), "prompt"),
    (dict(prompt={}), "prompt"),
    (dict(prompt=""), "prompt"),
    (dict(prompt=[]), "prompt"),
    (dict(prompt=["a", 1]), "prompt"),
    (dict(prompt=[[1], "a"]), "prompt"),
    (dict(prompt=["a", ""]), "prompt[1]"),
    (dict(prompt=[[]]), "prompt"),
    (dict(prompt=[-1]), "prompt"),
    (dict(prompt=[10**6]), "prompt"),
    (dict(prompt=[10**30]), "prompt"),
    (dict(prompt=[1.5]), "prompt"),
    (dict(prompt=[True]), "prompt"),
    (dict(prompt=["a"] * 1025), "prompt"),
    (dict(prompt="word " * 600), "prompt"),
    (dict(prompt=[4] * 512), "prompt"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(max_tokens=-5, echo=True), "max_tokens"),
    (dict(max_tokens=-1), "max_tokens"),
    (dict(max_tokens="5"), "max_tokens"),
    (dict(max_tokens=10**30), "max_tokens"),
    (dict(max_tokens=1.5), "max_tokens"),
    (dict(n=0), "n"),
    (dict(n=10**9), "n"),
    (dict(temperature=-0.1), "temperature"),
    (dict(temperature=1e300), "temperature"),
    (dict(temperature="hot"), "temperature"),
    (dict(temperature=True), "temperature"),
    (dict(top_p=0), "top_p"),
    (dict(top_p=1.01), "top_p"),
    (dict(top_k=-2), "top_k"),
    (dict(top_k=2**40), "top_k"),
    (dict(min_p=-0.5), "min_p"),
    (dict(min_p=2), "min_p"),
    (dict(seed=2**70), "seed"),
    (dict(seed="a"), "seed"),
    (dict(stop=5), "stop"),
    (dict(stop=["a"] * 65), "stop"),
    (dict(stop=""), "stop"),
    (dict(stop="x" * 1025), "stop"),
    (dict(stop_token_ids=[5, -1]), "stop_token_ids[1]"),
    (dict(priority=5), "priority"),
    (dict(stop_token_ids=[1] * 31), "stop_token_ids"),
    (dict(min_tokens=-1), "min_tokens"),
    (dict(min_tokens=20), "min_tokens"),
    (dict(logprobs=-1), "logprobs"),
    (dict(logprobs=26), "logprobs"),
    (dict(logprobs=True), "logprobs"),
    (dict(stream="yes"), "stream"),
    (dict(stream_options={"include_usage": True}), "stream_options"),
    (dict(stream_options={"include_draft_spans": True}), "stream_options"),
    (dict(max_tokens=5000), "max_tokens"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(priority=10**30), "priority"),
    (dict(logprobs=20, n=100, max_tokens=400), "logprobs"),
    (dict(stream=True, stream_options={"unknown": 1}), "stream_options.unknown"),
    (dict(stream=True, stream_options=5), "stream_options"),
    (dict(cache_salt=""), "cache_salt"),
    (dict(cache_salt="x" * 1025), "cache_salt"),
    (dict(request_id="two words"), "request_id"),
    (dict(request_id="x" * 129), "request_id"),
    (dict(priority=1.5), "priority"),
    (dict(model=5), "model"),
    (dict(nonsense=1), "nonsense"),
    (dict(Prompt="a"), "Prompt"),
    # Of others, not supported, and never ignored.
    (dict(suffix="the end"), "suffix"),
    (dict(n=3, best_of=2), "best_of"),
    (dict(best_of=2, stream=True), "best_of"),
    (dict(stream_interval=0), "stream_interval"),
    (dict(repetition_detection={"max_pattern_size": 2}), "min_count"),
    (dict(frequency_penalty=2.5), "frequency_penalty"),
    (dict(repetition_penalty=0), "repetition_penalty"),
    (dict(logit_bias={"50000": 1.0}), "logit_bias"),
    (dict(allowed_token_ids=[50000]), "allowed_token_ids"),
    (dict(logprob_token_ids=[50000]), "logprob_token_ids"),
    (dict(bad_words=[" "]), "bad_words"),
    (dict(length_penalty=2.0), "length_penalty"),
    (dict(early_stopping=True), "early_stopping"),
    (dict(use_beam_search=True, top_p=0.5), "top_p"),
    (dict(use_beam_search=True, stop="x"), "stop"),
    (dict(use_beam_search=True, prompt_logprobs=1), "prompt_logprobs"),
    (dict(use_beam_search=True, n=11), "n"),
    (dict(use_beam_search=True, length_penalty=99.0), "length_penalty"),
    (dict(prompt_logprobs=26), "prompt_logprobs"),
    (dict(prompt_logprobs=-1), "prompt_logprobs"),
    (dict(prompt_logprobs=-2), "prompt_logprobs"),
    (dict(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (dict(truncate_prompt_tokens=10**6), "truncate_prompt_tokens"),
    (dict(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (dict(logits_processors=["x"]), "logits_processors"),
    (dict(response_format={"type": "xml"}), "response_format.type"),
    (dict(service_tier="gold"), "service_tier"),
    (dict(guided_json={}), "guided_json"),
    (dict(structured_outputs={}), "structured_outputs"),
    (dict(structured_outputs={"json": {"not": {}}}), "structured_outputs"),
    (dict(structured_outputs={"grammar": "start: b"}, stream=True), "structured_outputs"),  # before the head is sent
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_field_is_named(server, body, param):
    status, error = server.error(PATH, **dict(prompt=PROMPT, max_tokens=4) | body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert len(error["message"]) < 300
    assert "/" not in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        dict(suffix="", best_of=1, frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1, logit_bias={}),
        dict(use_beam_search=False, length_penalty=1, early_stopping=False),
        dict(bad_words=[], response_format={"type": "text"}, service_tier="auto"),
        dict(user="me", metadata={"a": "b"}, safety_identifier="x", prompt_cache_key="y", priority=0),
        dict(stream_options={}, structured_outputs=None, kv_transfer_params=None, vllm_xargs={}),
        dict(best_of=None, truncate_prompt_tokens=None, skip_reading_prefix_cache=False, repetition_detection={}),
        dict(stop=None, seed=-1, top_k=-1, n=None, stream=False, logprobs=None, echo=None),
    ],
)
def test_what_changes_nothing_is_taken(server, body):
    text = complete(server, **GREEDY)["choices"][0]["text"]
    assert complete(server, **GREEDY | body)["choices"][0]["text"] == text


def test_the_best_of_several(server):
    body = dict(prompt=PROMPT, max_tokens=8, temperature=1.5, seed=3)
    drawn = complete(server, **body, n=5, logprobs=0)["choices"]
    best = sorted(drawn, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    chosen = complete(server, **body, n=2, best_of=5)["choices"]
    assert [(choice["index"], choice["text"]) for choice in chosen] == list(enumerate(b["text"] for b in best[:2]))


def test_a_beam_search(server):
    search = GREEDY | dict(use_beam_search=True, n=3, length_penalty=0.8, early_stopping=False)
    answer = complete(server, **search, logprobs=2, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    num_prompt = answer["usage"]["prompt_tokens"]

    def score(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(choice["token_ids"])
        return sum(logprobs) / (num_prompt + len(logprobs)) ** 0.8

    unfinished = [score(choice) for choice in answer["choices"] if choice["finish_reason"] == "length"]
    assert unfinished and unfinished == sorted(unfinished, reverse=True)
    [alone] = complete(server, **GREEDY | dict(use_beam_search=True))["choices"]
    assert alone["text"] == complete(server, **GREEDY)["choices"][0]["text"]
    texts = [choice["text"] for choice in answer["choices"]]
    assert list(joined(stream(server, **search)).values()) == texts

    async def ask() -> list[str]:
        params = BeamSearchParams(3, 12, length_penalty=0.8)
        [output] = [output async for output in server.llm.beam_search(PROMPT, params)]
        return [completion.text for completion in output.outputs]

    assert server.portal.call(ask) == texts


def test_a_prompt_that_is_truncated(server):
    [whole, kept] = (
        complete(server, **GREEDY | dict(prompt=prompt), truncate_prompt_tokens=count, return_token_ids=True)
        for prompt, count in ((list(range(10, 30)), None), (list(range(300, 310)) + list(range(10, 30)), 20))
    )
    assert kept["choices"][0]["prompt_token_ids"] == list(range(10, 30))
    assert kept["usage"]["prompt_tokens"] == 20
    assert kept["choices"][0]["text"] == whole["choices"][0]["text"]
    room = server.llm.facts.max_model_len
    many = dict(prompt="word " * 10_000, max_tokens=room - 3)
    assert complete(server, **many, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 3


def test_the_prefix_cache_may_be_passed_by(server):
    body = GREEDY | dict(prompt=list(range(10, 60)))
    complete(server, **body)
    cached = [
        complete(server, **body, skip_reading_prefix_cache=skips)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for skips in (True, False)
    ]
    assert cached == [0, 48]


def test_an_answer_that_repeats_itself_is_ended(server):
    forever = dict(prompt=PROMPT, temperature=0, max_tokens=400, ignore_eos=True)
    detection = dict(max_pattern_size=200, min_count=2)
    [choice] = scored(server, **forever, repetition_detection=detection)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    chunks = stream(server, **forever, repetition_detection=detection)
    assert joined(chunks)[0] == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "repetition"


def test_chunks_of_several_tokens(server):
    sizes = [
        len(chunk["choices"][0]["token_ids"])
        for chunk in stream(server, **GREEDY, stream_interval=4, return_token_ids=True, ignore_eos=True)
    ]
    assert sum(sizes) == 12 and min(sizes[1:-1]) >= 4


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"null", b'"text"', b'{"prompt": NaN}', b"\xff", b"[" * 100_000]
)
def test_a_body_that_is_no_request(server, body):
    response = server.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_model_that_is_not_here(server):
    status, error = server.error(PATH, **GREEDY, model="gpt-9" * 50)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert len(error["message"]) < 200


def test_a_request_id_that_is_in_use(server):
    with server.client.stream("POST", PATH, json=ENDLESS | {"stream": True, "request_id": "same"}) as response:
        lines = response.iter_lines()  # closes the response when it is dropped
        next(lines)
        assert server.error(PATH, **GREEDY, request_id="same")[0] == 400


# ---- leaving early ----


def test_who_leaves_a_stream_aborts_it(server):
    with server.client.stream("POST", PATH, json=ENDLESS | dict(stream=True, request_id="left")) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.llm.num_requests == 1
    server.until_idle()
    assert "left" in server.losses.request_ids


def test_who_does_not_wait_for_an_answer_aborts_it(server):
    request = server.client.build_request("POST", PATH, json=ENDLESS | dict(prompt=[PROMPT] * 3, request_id="away"))
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((request.url.host, request.url.port)) as client:
        client.sendall(f"{head}content-length: {len(request.content)}\r\n\r\n".encode() + request.content)
        wait_until(lambda: server.llm.num_requests == 3)
    server.until_idle()
    assert {"away-0", "away-1", "away-2"} <= set(server.losses.request_ids)


def test_a_request_that_takes_too_long(server):
    config = ServerConfig(request_timeout=0.05)
    response = server.ask(config, PATH, **LONG, n=8)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"
    *_, error, done = server.cut_stream(PATH, **LONG, n=8)
    assert (error.name, error.data["error"]["type"], done.data) == ("error", "timeout_error", "[DONE]")
    response = server.ask(config, PATH, **LONG | {"prompt": [PROMPT] * 4})
    assert response.status_code == 504
    server.until_idle()


def test_text_is_utf8_and_never_half_a_character(server):
    prompt = "naïve 日本 \U0001f40c é"
    text = complete(server, prompt=prompt, echo=True, max_tokens=1)["choices"][0]["text"]
    assert text.startswith(prompt)
    assert json.loads(json.dumps(text)) == text


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_is_told_in_a_header(server, stream):
    form = {"json": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"type": "null"}}, "lenient": True}
    body = dict(prompt=PROMPT, max_tokens=8, stream=stream, structured_outputs=form)
    warnings = json.loads(server.post(PATH, **body).headers["x-warnings"])
    assert warnings == ['the keyword "uniqueItems" at # is not enforced']
    assert "x-warnings" not in server.post(PATH, **body | {"structured_outputs": None}).headers
