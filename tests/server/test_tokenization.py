"""`/tokenize` and `/detokenize`."""

from typing import Any

import jinja2
import pytest

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.protocol.tokenization import DetokenizeResponse, TokenizeResponse
from tests.server.conftest import Server

MESSAGES = [{"role": "user", "content": "Hello"}]


def tokenize(server: Server, **body: Any) -> Any:
    answer = server.answer("/tokenize", **body)
    TokenizeResponse.model_validate(answer)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    return answer


def text_of(server: Server, tokens: list[int]) -> str:
    answer = server.answer("/detokenize", tokens=tokens)
    DetokenizeResponse.model_validate(answer)
    return answer["prompt"]


@pytest.mark.parametrize("text", ["Hello", "", "a\nb", "日本 \U0001f40c", "<|end|>", " spaces  here "])
def test_a_text_comes_back(server, text):
    tokens = tokenize(server, prompt=text, add_special_tokens=False)["tokens"]
    assert text_of(server, tokens) == text


def test_special_tokens(server):
    tokens = tokenize(server, prompt="Hello")["tokens"]
    assert tokens[1:] == tokenize(server, prompt="Hello", add_special_tokens=False)["tokens"]
    assert text_of(server, tokens) == "<|bos|>Hello"


def test_messages_become_the_prompt_of_chat(server):
    tokens = tokenize(server, messages=MESSAGES)["tokens"]
    assert text_of(server, tokens) == "<|bos|><|user|>Hello<|end|><|assistant|>"
    left_open = tokenize(server, messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert tokens[:-1] == left_open
    continued = [*MESSAGES, {"role": "assistant", "content": "Hi"}]
    tokens = tokenize(server, messages=continued, continue_final_message=True)["tokens"]
    assert text_of(server, tokens) == "<|bos|><|user|>Hello<|end|><|assistant|>Hi"
    tokens = tokenize(server, messages=MESSAGES, chat_template_kwargs={"bos_token": ""})["tokens"]
    assert text_of(server, tokens) == "<|user|>Hello<|end|><|assistant|>"


def test_how_the_vocabulary_spells_them(server):
    answer = tokenize(server, prompt="Hello there", return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"][0] == "<|bos|>"
    assert tokenize(server, prompt="Hello there")["token_strs"] is None  # as vLLM's


def test_more_than_the_model_takes(server):
    assert tokenize(server, prompt="word " * 1000)["count"] > 512


def test_what_the_tokenizer_is(server):
    """What lm-eval's remote tokenizer reads: off unless it is asked for, as vLLM's."""
    assert server.client.get("/tokenizer_info").status_code == 404
    info = server.ask(ServerConfig(enable_tokenizer_info_endpoint=True), "/tokenizer_info", "GET").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|bos|>", "<|end|>", "<|pad|>")
    assert info["unk_token"] is None
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    shown = jinja2.Template(info["chat_template"], trim_blocks=True, lstrip_blocks=True).render(
        messages=MESSAGES, add_generation_prompt=True, **info
    )
    assert shown == text_of(server, tokenize(server, messages=MESSAGES)["tokens"])


def test_tools_are_a_part_of_the_prompt(server):
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "Tells the weather."}}]
    assert "get_weather(): Tells the weather." in text_of(
        server, tokenize(server, messages=MESSAGES, tools=tools)["tokens"]
    )


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", dict(), "prompt"),
    ("/tokenize", dict(prompt="a", messages=MESSAGES), "prompt"),
    ("/tokenize", dict(prompt=5), "prompt"),
    ("/tokenize", dict(prompt=["a"]), "prompt"),
    ("/tokenize", dict(messages=[]), "messages"),
    ("/tokenize", dict(messages=[{"role": "user"}]), "messages[0].content"),
    ("/tokenize", dict(prompt="a", add_generation_prompt=True), "add_generation_prompt"),
    ("/tokenize", dict(prompt="a", continue_final_message=True), "continue_final_message"),
    ("/tokenize", dict(prompt="a", chat_template_kwargs={}), "chat_template_kwargs"),
    ("/tokenize", dict(messages=MESSAGES, chat_template_kwargs={"tools": []}), "chat_template_kwargs"),
    ("/tokenize", dict(messages=MESSAGES, chat_template="x"), "chat_template"),
    ("/tokenize", dict(messages=MESSAGES, tools=[{}]), "tools[0].type"),
    ("/tokenize", dict(prompt="a", tools=[]), "tools"),
    (
        "/tokenize",
        dict(messages=MESSAGES, add_generation_prompt=True, continue_final_message=True),
        "add_generation_prompt",
    ),
    ("/tokenize", dict(prompt="a", unknown=1), "unknown"),
    ("/detokenize", dict(), "tokens"),
    ("/detokenize", dict(tokens="a"), "tokens"),
    ("/detokenize", dict(tokens=[1.5]), "tokens[0]"),
    ("/detokenize", dict(tokens=[True]), "tokens[0]"),
    ("/detokenize", dict(tokens=[5, -1]), "tokens[1]"),
    ("/detokenize", dict(tokens=[10**30]), "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_a_bad_field_is_named(server, path, body, param):
    status, error = server.error(path, **body)
    assert (status, error["param"]) == (400, param)
    assert param in error["message"]


def test_a_model_that_is_not_here(server):
    assert server.error("/tokenize", prompt="a", model="x")[0] == 404
    assert server.error("/detokenize", tokens=[1], model="x")[0] == 404
