"""`/v1/chat/completions`: conversations in, answers out, and OpenAI's own client as judge."""

import asyncio
import json
import re
from typing import Any

import pytest

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.protocol.chat_completions import ChatChunk, ChatResponse
from jaxvllm.server.service import Service
from jaxvllm.worker.async_llm import AsyncLLM
from tests.server.conftest import Server
from tests.server.judges import judge

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = dict(messages=MESSAGES, temperature=0, max_completion_tokens=10)
LONG: dict[str, Any] = dict(messages=MESSAGES, temperature=0, ignore_eos=True)


def chat(server: Server, **body: Any) -> Any:
    answer = server.answer(PATH, **body)
    ChatResponse.model_validate(answer)
    judge("openai.types.chat.ChatCompletion").validate_python(answer)
    return answer


def said(server: Server, **body: Any) -> str:
    return chat(server, **GREEDY | body)["choices"][0]["message"]["content"]


def stream(server: Server, **body: Any) -> list[Any]:
    """The chunks of a stream that ended well."""
    events = server.events(PATH, **body)
    assert events.pop().data == "[DONE]"
    for event in events:
        assert event.name is None
        ChatChunk.model_validate(event.data)
        judge("openai.types.chat.ChatCompletionChunk").validate_python(event.data)
    return [event.data for event in events]


def joined(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice."""
    whole: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole[choice["index"]] = whole.get(choice["index"], "") + choice["delta"]["content"]
    return whole


def test_an_answer(server):
    answer = chat(server, **GREEDY)
    [choice] = answer["choices"]
    assert (answer["model"], answer["object"]) == ("demo", "chat.completion")
    assert choice["message"]["role"] == "assistant"
    assert "Paris" in choice["message"]["content"]
    assert choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] <= 10


def test_a_stream_says_the_same(server):
    chunks = stream(server, **GREEDY)
    assert joined(chunks) == {0: said(server)}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) == {None}


def test_several_choices(server):
    body = dict(messages=MESSAGES, n=3, seed=5, temperature=1.0, max_tokens=8)
    texts = {choice["index"]: choice["message"]["content"] for choice in chat(server, **body)["choices"]}
    assert list(texts) == [0, 1, 2]
    assert joined(stream(server, **body)) == texts


def test_usage_of_a_stream(server):
    whole = chat(server, **GREEDY)["usage"]
    *chunks, last = stream(server, **GREEDY, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], whole)
    assert all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(server, **GREEDY, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[0] == 0  # the first chunk tells only the role
    assert counts[-1] == whole["completion_tokens"]
    # As in vLLM, the second option needs the first.
    alone = stream(server, **GREEDY, stream_options={"continuous_usage_stats": True})
    assert all(chunk["usage"] is None for chunk in alone)


def test_it_ends_where_the_model_does(server):
    answer = chat(server, messages=MESSAGES, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None


def test_max_completion_tokens_goes_before_its_older_name(server):
    assert chat(server, **LONG, max_tokens=3)["usage"]["completion_tokens"] == 3
    assert chat(server, **LONG, max_tokens=9, max_completion_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("count", [None, 0, 3])
def test_logprobs(server, count):
    body = GREEDY | dict(logprobs=True, top_logprobs=count)
    [choice] = chat(server, **body)["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(choice["message"]["content"])
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == (count or 0)
        for best in entry["top_logprobs"][:1]:
            assert (best["token"], best["logprob"]) == (entry["token"], entry["logprob"])
    chunks = stream(server, **body)
    streamed = [entry for chunk in chunks if chunk["choices"][0]["logprobs"] for entry in _content(chunk)]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]


def _content(chunk: Any) -> Any:
    return chunk["choices"][0]["logprobs"]["content"]


def test_prompt_logprobs(server):
    answer = chat(server, **GREEDY, prompt_logprobs=1, return_token_ids=True)
    first, *scores = answer["prompt_logprobs"]
    assert first is None
    assert [next(iter(told)) for told in scores] == [str(token) for token in answer["prompt_token_ids"][1:]]
    assert chat(server, **GREEDY)["prompt_logprobs"] is None
    assert server.error(PATH, **GREEDY, prompt_logprobs=1, stream=True)[1]["param"] == "prompt_logprobs"


def test_more_tokens_than_there_is_room_for(server):
    """A limit beyond the room is the room. Only what no prompt could have is refused."""
    for field in ("max_tokens", "max_completion_tokens"):
        answer = chat(server, messages=MESSAGES, **{field: 512}, ignore_eos=True)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", 512)
        status, error = server.error(PATH, messages=MESSAGES, **{field: 513})
        assert (status, error["param"], error["code"]) == (400, field, "context_length_exceeded")
        assert "maximum context length is 512 tokens" in error["message"]


def test_a_conversation_that_is_too_long(server):
    for text in ("word " * 600, "word " * 10**6):
        status, error = server.error(PATH, messages=[{"role": "user", "content": text}])
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert "This model's maximum context length is 512 tokens" in error["message"]


def test_who_answered_is_told(server):
    """Stable, so that clients notice when the same seed may give other tokens."""
    told = [chat(server, **GREEDY), *stream(server, **GREEDY), server.answer("/v1/completions", prompt="a")]
    [fingerprint] = {one["system_fingerprint"] for one in told}
    assert re.fullmatch(r"fp_[0-9a-f]{12}", fingerprint)
    assert {one["service_tier"] for one in told} == {None}
    assert chat(server, **GREEDY, service_tier="auto")["service_tier"] == "default"


def test_a_whole_answer_has_all_fields(server):
    """Programs for vLLM and OpenAI read them without asking whether they are there."""
    answer = chat(server, **GREEDY)
    assert {"prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "metrics"} <= answer.keys()
    [choice] = answer["choices"]
    assert {"logprobs", "stop_reason", "token_ids"} <= choice.keys()
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]} | nothing


def test_what_operators_set_for_all_requests(server):
    config = ServerConfig(
        enable_per_request_metrics=True,
        enable_force_include_usage=True,
        return_tokens_as_token_ids=True,
        default_chat_template_kwargs='{"bos_token": ""}',
    )
    body = dict(messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True)
    answer = server.ask(config, PATH, **body).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert all(entry["token"].startswith("token_id:") for entry in entries)
    times = answer["metrics"]
    assert times["queue_time_ms"] >= 0 and times["tokens_per_second"] > 0
    assert times["generation_time_ms"] == pytest.approx(2 * times["mean_itl_ms"])
    assert server.ask(config, PATH, **body, n=2).json()["metrics"] is None
    prompt = server.ask(config, PATH, **body, return_token_ids=True).json()["prompt_token_ids"]
    plain = chat(server, **body, return_token_ids=True)["prompt_token_ids"]
    assert prompt == plain[1:]
    # A request's own variable wins.
    own = dict(chat_template_kwargs={"bos_token": "<|bos|>"}, return_token_ids=True)
    assert server.ask(config, PATH, **body, **own).json()["prompt_token_ids"] == plain
    # This template adds a text to the content, and cannot have a list.
    refused = server.ask(ServerConfig(chat_template_content_format="openai"), PATH, **body)
    assert refused.status_code == 400 and "the chat template refused the messages" in refused.text
    chunks = [
        line for line in server.ask(config, PATH, **body, stream=True).text.splitlines() if line.startswith("data: {")
    ]
    *parts, last = map(json.loads, (chunk.removeprefix("data: ") for chunk in chunks))
    assert all(part["usage"]["total_tokens"] for part in parts) and last["metrics"]["tokens_per_second"] > 0


@pytest.mark.parametrize("options", [{"mesh": "2x1"}, {"dtype": "bfloat16"}, {"model": "other"}])
def test_fingerprints_of_others_differ(options):
    plain, same, other = (
        Service(AsyncLLM(**chosen), ServerConfig()).fingerprint for chosen in ({}, {"max_num_seqs": 4}, options)
    )
    assert plain == same != other


def test_token_ids(server):
    answer = chat(server, **GREEDY, return_token_ids=True)
    prompt = server.answer("/tokenize", messages=MESSAGES)["tokens"]
    assert answer["prompt_token_ids"] == prompt
    [choice] = answer["choices"]
    text = server.answer("/detokenize", tokens=choice["token_ids"])["prompt"]
    assert text.removesuffix("<|end|>") == choice["message"]["content"]
    chunks = stream(server, **GREEDY, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == prompt
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]


def test_content_in_parts_is_joined_by_newlines(server):
    def count(content):
        return chat(server, messages=[{"role": "user", "content": content}], max_tokens=1, return_token_ids=True)

    parts = [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who are you?"}]
    assert count(parts)["prompt_token_ids"] == count("Hello.\nWho are you?")["prompt_token_ids"]


def test_the_last_message_is_continued(server):
    whole = said(server)
    started = [*MESSAGES, {"role": "assistant", "content": whole[:3]}]
    body = GREEDY | dict(messages=started, continue_final_message=True)
    assert said(server, **body) == whole[3:]
    assert said(server, **body, echo=True) == whole
    assert joined(stream(server, **body, echo=True)) == {0: whole}
    assert said(server, **body, add_generation_prompt=False) == whole[3:]


def test_who_speaks_next_is_left_open(server):
    with_it, without = (
        chat(server, **GREEDY, add_generation_prompt=added)["usage"]["prompt_tokens"] for added in (True, False)
    )
    assert with_it == without + 1


def test_variables_of_the_template(server):
    plain = chat(server, **GREEDY, return_token_ids=True)["prompt_token_ids"]
    other = chat(server, **GREEDY, return_token_ids=True, chat_template_kwargs={"bos_token": "", "unused": 1})
    assert other["prompt_token_ids"] == plain[1:]


def test_cached_tokens(server):
    messages = [{"role": "system", "content": "You are a very patient teacher. " * 8}, *MESSAGES]
    first, second = (
        chat(server, messages=messages, max_tokens=1, cache_salt="chat")["usage"]["prompt_tokens_details"]
        for _ in range(2)
    )
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= 16


# ---- refusals ----

USER = {"role": "user", "content": "Hello"}
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(messages=None), "messages"),
    (dict(messages=[]), "messages"),
    (dict(messages="Hello"), "messages"),
    (dict(messages=[5]), "messages[0]"),
    (dict(messages=[{}]), "messages[0].role"),
    (dict(messages=[{"role": "user"}]), "messages[0].content"),
    (dict(messages=[{"role": "robot", "content": "a"}]), "messages[0].role"),
    (dict(messages=[USER, {"role": "user", "content": 5}]), "messages[1].content"),
    (dict(messages=[{"role": "user", "content": [5]}]), "messages[0].content[0]"),
    (
        dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        "messages[0].content[0]",
    ),
    (dict(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]), "messages[0].content[0]"),
    (dict(messages=[{"role": "assistant", "content": "a", "tool_calls": 5}]), "messages[0].tool_calls"),
    (
        dict(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (dict(messages=[{"role": "user", "content": "word " * 600}]), "messages"),
    (dict(stop=["a", ""]), "stop"),
    (dict(stop_token_ids=[5, -1]), "stop_token_ids[1]"),
    (dict(priority=5), "priority"),
    (dict(spaces_between_special_tokens=False, skip_special_tokens=False), "spaces_between_special_tokens"),
    (dict(prompt="a"), "prompt"),
    (dict(max_completion_tokens=0), "max_completion_tokens"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(top_logprobs=1), "top_logprobs"),
    (dict(logprobs=True, top_logprobs=26), "top_logprobs"),
    (dict(logprobs=5), "logprobs"),
    (dict(stream_options={"include_usage": True}), "stream_options"),
    (dict(add_generation_prompt=True, continue_final_message=True), "add_generation_prompt"),
    (dict(chat_template_kwargs=5), "chat_template_kwargs"),
    (dict(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (dict(chat_template_kwargs={"conversation": []}), "chat_template_kwargs"),
    (dict(chat_template_kwargs={"self": 1}), "chat_template_kwargs"),
    (dict(chat_template_kwargs={"tools": [{}]}), "chat_template_kwargs"),
    (dict(temperature=3e6), "temperature"),
    (dict(n=0), "n"),
    (dict(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(functions=[{"name": ""}]), "functions[0].name"),
    (dict(functions={"name": "f"}), "functions"),
    (dict(function_call={"name": "f"}), "function_call"),
    (dict(modalities=["text", "audio"]), "modalities"),
    (dict(audio={"voice": "alloy"}), "audio"),
    (dict(reasoning_effort="heavy"), "reasoning_effort"),
    (dict(verbosity="loud"), "verbosity"),
    (dict(web_search_options={}), "web_search_options"),
    (dict(store=True), "store"),
    (dict(chat_template="{{ 1 }}"), "chat_template"),
    (dict(documents=[{"text": "a"}]), "documents"),
    (dict(mm_processor_kwargs={"a": 1}), "mm_processor_kwargs"),
    (dict(response_format={"type": "json_schema", "json_schema": {}}), "response_format.json_schema.name"),
    (dict(suffix="a"), "suffix"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_field_is_named(server, body, param):
    status, error = server.error(PATH, **dict(messages=[USER], max_tokens=4) | body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert len(error["message"]) < 300


def test_what_a_template_refuses_is_told(server):
    status, error = server.error(PATH, messages=[{"role": "ipython", "content": "Be brief."}, USER])
    assert (status, error["param"]) == (400, "messages")
    assert "role ipython is unknown" in error["message"]


def test_a_request_that_takes_too_long(server):
    config = ServerConfig(request_timeout=0.05)
    assert server.ask(config, PATH, **LONG, n=8).status_code == 504
    *_, error, done = server.cut_stream(PATH, **LONG, n=8)
    assert (error.name, error.data["error"]["type"], done.data) == ("error", "timeout_error", "[DONE]")


# ---- OpenAI's client ----


@pytest.fixture
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_of_openai(server, client):
    completion = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=10, extra_body={"top_k": 5}
    )
    assert completion.choices[0].message.content == said(server)
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    chunks = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=10, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said(server)
    assert [model.id for model in client.models.list()] == ["demo"]


def test_the_client_streams_with_events(server, client):
    with client.chat.completions.stream(model="demo", messages=MESSAGES, temperature=0, max_tokens=10) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == said(server)


def test_the_client_that_awaits(server):
    import openai

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(
                model="demo", messages=MESSAGES, temperature=0, max_tokens=10, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(run()) == said(server)


def test_the_client_raises_errors_of_their_kind(client):
    import openai

    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)


def test_a_beam_search(server):
    search = GREEDY | dict(use_beam_search=True, n=2)
    answer = chat(server, **search, logprobs=True, top_logprobs=2)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 2 and "Paris" in texts[0]
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])
    assert joined(stream(server, **search)) == dict(enumerate(texts))
    # Without a limit an answer may be as long as the model: EOS ends it.
    [first, _] = chat(server, messages=MESSAGES, temperature=0, use_beam_search=True, n=2, early_stopping=True)[
        "choices"
    ]
    assert first["finish_reason"] == "stop" and first["stop_reason"] in server.llm.facts.eos_token_ids


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("spelling", ["<tool_call>", "<|end|>", "a<|user|>b"])
def test_a_forced_call_may_spell_added_tokens(server, choice: str, spelling: str) -> None:
    parameters = {"type": "object", "properties": {spelling: {"const": spelling}}, "required": [spelling]}
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    chosen: Any = "required" if choice == "required" else {"type": "function", "function": {"name": "f"}}
    body = dict(messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=chosen, max_tokens=80)
    [one] = chat(server, **body, parallel_tool_calls=False)["choices"]
    [call] = one["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {spelling: spelling})
