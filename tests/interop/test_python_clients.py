"""Python's `openai`, `anthropic` and `langchain-openai` work unmodified."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.faults.server import KEY

# Clients are imported by the tests that need them: all processes of a run collect this file, and one of them runs it.
if TYPE_CHECKING:
    import openai

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def client(url: str) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_chat(client: "openai.OpenAI") -> None:
    answer = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2, n=2)  # type: ignore[call-overload]
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    assert answer.usage.total_tokens == 13 + 2 * 10
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_a_stream(client: "openai.OpenAI") -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**ASKED, **options))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[-1].usage.completion_tokens == 10 and not chunks[-1].choices


def test_a_stream_with_its_helper(client: "openai.OpenAI") -> None:
    with client.chat.completions.stream(**ASKED) as stream:  # type: ignore[arg-type]
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_completions(client: "openai.OpenAI") -> None:
    extra = {"min_p": 0.1, "top_k": 5, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model="demo", prompt=["The capital of France is"] * 2, temperature=0, max_tokens=4, extra_body=extra
    )
    assert [choice.text for choice in answer.choices] == [answer.choices[0].text] * 2
    assert answer.choices[0].text.startswith(" Paris.")
    assert len(answer.choices[0].model_dump()["token_ids"]) == 4


def test_embeddings(client: "openai.OpenAI", url: str) -> None:
    """The client asks for base64 by default, and decodes it."""
    from langchain_openai import OpenAIEmbeddings

    texts = ["Once upon a time", "Long ago"]
    answer = client.embeddings.create(model="demo", input=texts)
    numbers = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    for one, other in zip(answer.data, numbers.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    langchain = OpenAIEmbeddings(base_url=url, api_key=KEY, model="demo", check_embedding_ctx_length=False)
    assert langchain.embed_query(texts[0]) == pytest.approx(answer.data[0].embedding, abs=1e-5)


def test_responses(client: "openai.OpenAI") -> None:
    asked = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    assert client.responses.create(**asked).output_text == ANSWER  # type: ignore[call-overload]
    with client.responses.stream(**asked) as stream:  # type: ignore[arg-type]
        assert stream.get_final_response().output_text == ANSWER


def test_errors_are_typed(client: "openai.OpenAI", url: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature must be a number") as caught:
        client.chat.completions.create(**ASKED | {"temperature": -1})  # type: ignore[call-overload]
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.chat.completions.create(**ASKED | {"model": "gpt-17"})  # type: ignore[call-overload]
    assert missing.value.code == "model_not_found"
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            stranger.models.list()


def test_what_is_too_long_is_recognised(client: "openai.OpenAI", url: str) -> None:
    """litellm, which is too large to install here, looks for the same: tests/server has its words."""
    import anthropic
    import openai
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    for text in ("word " * 700, "word " * 10**6):
        messages = [{"role": "user", "content": text}]
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 512 tokens") as caught:
            client.chat.completions.create(**ASKED | {"messages": messages})  # type: ignore[call-overload]
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(ContextOverflowError):
            ChatOpenAI(base_url=url, api_key=KEY, model="demo", max_retries=0).invoke(text)
        with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0) as other:
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
                other.messages.create(model="demo", max_tokens=4, messages=messages)  # type: ignore[arg-type]


def test_async(url: str) -> None:
    import openai

    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(**ASKED) for _ in range(8))  # type: ignore[call-overload]
            )
            stream = await client.chat.completions.create(**ASKED, stream=True)  # type: ignore[call-overload]
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return [answer.choices[0].message.content for answer in answers] + [text]

    assert set(asyncio.run(run())) == {ANSWER}


def test_anthropic(url: str) -> None:
    import anthropic

    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 20, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        answer = client.messages.create(**asked)  # type: ignore[call-overload]
        assert answer.content[0].text == ANSWER and answer.stop_reason == "end_turn"
        with client.messages.stream(**asked) as stream:  # type: ignore[arg-type]
            assert "".join(stream.text_stream) == ANSWER
            assert stream.get_final_message().usage.output_tokens == 10
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(**asked | {"extra_body": {"temperature": -1}})  # type: ignore[call-overload]
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**asked | {"model": "claude"})  # type: ignore[call-overload]


def test_langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key=KEY, model="demo", temperature=0, max_tokens=20, max_retries=0)
    assert chat.invoke(QUESTION).content == ANSWER
    chunks = list(chat.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == ANSWER
    assert [answer.content for answer in chat.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]
