import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from jaxvllm.text.chat_messages import checked_messages
from jaxvllm.text.chat_template import ChatTemplate, read_chat_template
from jaxvllm.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import (
    TEMPLATE,
    byte_fallback_backend,
    byte_level_backend,
    save,
    small_tokenizer,
)

HI = [{"role": "user", "content": "hi"}]


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens)


def test_encode_and_decode_round_trip() -> None:
    tokenizer = small_tokenizer("byte_level")
    text = "Once upon a time, 東京都 🙂\n\tend"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode([*token_ids, *tokenizer.eos_token_ids]) == text
    assert tokenizer.decode([*tokenizer.eos_token_ids], skip_special_tokens=False) == "<|end|>"
    assert max(token_ids) < tokenizer.vocab_size


def test_a_directory_with_or_without_a_tokenizer(tmp_path: Path) -> None:
    assert not Tokenizer.exists_in(tmp_path)
    assert Tokenizer.exists_in(save(byte_level_backend(), tmp_path))


@pytest.mark.parametrize("prompt", ["\ud800", 7, None, b"bytes"])
def test_a_prompt_must_be_text(prompt: Any) -> None:
    with pytest.raises(ValueError, match="a prompt must be"):
        small_tokenizer("byte_level").encode(prompt)


def test_token_text_reads_as_in_the_middle_of_a_text() -> None:
    llama = small_tokenizer("byte_fallback")
    assert llama.token_text(llama.backend.token_to_id("▁hello")) == " hello"
    assert llama.token_text(llama.backend.token_to_id("<0x41>")) == "A"
    gpt = small_tokenizer("byte_level")
    assert gpt.token_text(gpt.backend.token_to_id("Ġ")) == " "
    assert gpt.token_text(gpt.backend.token_to_id("ä")) == "\ufffd"


@pytest.mark.parametrize("frame", ["$A", "<s> $A", "<s> $A <|end|>", "$A <|end|>"])
def test_special_tokens_stay_around_a_text_that_is_shortened(frame: str, tmp_path: Path) -> None:
    """The tokenizers library is the oracle: it truncates in the same way."""
    tokenizer = Tokenizer.from_directory(save(byte_level_backend(), tmp_path))
    special = [(token, tokenizer.backend.token_to_id(token)) for token in ("<s>", "<|end|>")]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    text = "Once upon a time there was a fox"
    whole = tokenizer.encode(text)
    for count in range(frame.count("<") or 1, len(whole)):
        tokenizer.backend.enable_truncation(count, direction="left")
        expected = tokenizer.encode(text)
        tokenizer.backend.no_truncation()
        assert tokenizer.shortened(whole, count) == expected


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    text = "Once upon a time there was a fox"
    assert Tokenizer.from_directory(save(backend, tmp_path)).encode(text) == small_tokenizer("byte_level").encode(text)


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_special_tokens_are_those_of_the_post_processor(tmp_path: Path, add_bos_token: bool) -> None:
    backend = byte_level_backend()
    body, bos = backend.encode("a fox").ids, backend.token_to_id("<s>")
    directory = save(backend, tmp_path, add_bos_token=add_bos_token, bos_token={"content": "<s>"})
    assert Tokenizer.from_directory(directory).encode("a fox") == body
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path, add_bos_token=add_bos_token, bos_token="<s>"))
    assert tokenizer.bos_token_id == bos
    assert tokenizer.encode("a fox") == [bos, *body]
    assert tokenizer.encode("a fox", add_special_tokens=False) == body


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"generation_config.json": {"eos_token_id": [2, 1]}, "config.json": {"eos_token_id": 5}}, (2, 1)),
        ({"generation_config.json": {"eos_token_id": 7}}, (2, 7)),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": 5}}, (5,)),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": {"content": "<s>"}}}, (1,)),
        ({"tokenizer_config.json": {}}, ()),
    ],
)
def test_eos_comes_from_the_tokenizer_and_the_generation_config(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    save(byte_fallback_backend(), tmp_path, eos_token="</s>")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_ids == expected
    assert tokenizer.eos_token_id == (expected[0] if expected else None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object, not a list"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id must be"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    save(byte_level_backend(), tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_directory(tmp_path)


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        Tokenizer.from_directory(tmp_path / "nowhere")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)  # its import fails, installed or not
    with pytest.raises(NotImplementedError, match="has no tokenizer.json: add it, or install transformers"):
        Tokenizer.from_directory(tmp_path)


# Chat templates


def test_chat_template_of_the_config() -> None:
    tokenizer = small_tokenizer("byte_level")
    assert tokenizer.apply_chat_template(HI) == "<s><|user|>hi<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=False) == "<s><|user|>hi<|end|>"


def test_a_chat_template_in_place_of_the_checkpoints(tmp_path: Path) -> None:
    """As a file or as itself, and with the checkpoint's special tokens."""
    source = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    tokenizer = small_tokenizer("byte_level").with_chat_template(read_chat_template(str(file)))
    assert tokenizer.apply_chat_template(HI) == "<s>[hi]"
    assert tokenizer.info["chat_template"] == source == read_chat_template(source)
    assert tokenizer.encode("hi") == small_tokenizer("byte_level").encode("hi")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("/nowhere/at/all.jinja", "neither a file that can be read nor a template"),
        ("", "neither a file"),
        ("{% if %}", "chat_template is not valid Jinja"),
    ],
)
def test_a_wrong_chat_template_is_told_before_anything_starts(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_chat_template(given)


def test_where_chat_templates_are_found(tmp_path: Path) -> None:
    def rendered(**config: object) -> str:
        save(byte_level_backend(), tmp_path, **config)
        tokenizer = Tokenizer.from_directory(tmp_path)
        tools = [{"type": "function", "function": {"name": "f"}}]
        return tokenizer.apply_chat_template(HI) + "|" + tokenizer.apply_chat_template(HI, tools=tools)

    with pytest.raises(ValueError, match="no chat template"):
        rendered()
    assert rendered(chat_template="one") == "one|one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    assert rendered(chat_template=named) == 'two|[{"type": "function", "function": {"name": "f"}}]'
    (tmp_path / "chat_template.jinja").write_text("three")
    assert rendered(chat_template="one") == "three|three"


def test_what_hugging_face_templates_count_on() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {% generation %}\n"
        "{{ {'text': m.content} | tojson }}\n"
        "    {% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ eos_token }}{{ strftime_now('%%') }}{{ enable_thinking }}{{ missing is defined }}"
    )
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "é <b>"}]
    assert template(source, eos_token="</s>").render(messages, enable_thinking=False) == (
        '{"text": "é <b>"}\n</s>%FalseFalse'
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refused the messages: .*unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "refused the messages: Range too big"),
        ("{% if %}", "is not valid Jinja"),
    ],
)
def test_a_template_that_fails_is_an_error_in_its_words(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        template(source).render(HI)


@pytest.mark.parametrize("content", ["Sure, ", " {", ""])
def test_continue_final_message_leaves_it_open(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    prompt = template(TEMPLATE, bos_token="<s>").render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt == "<s><|user|>hi<|end|><|assistant|>" + content


def test_continue_final_message_refuses_what_it_cannot() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        template(TEMPLATE).render(HI, continue_final_message=True)
    with pytest.raises(ValueError, match="leaves out the final message"):
        template("nothing").render(HI, add_generation_prompt=False, continue_final_message=True)


# Messages


def test_messages_become_what_templates_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "Al",
        },
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    user, assistant, tool = checked_messages(messages)
    assert user == {"role": "user", "content": "a\nb", "name": "Al"}
    assert assistant["content"] == "", "a template would write None"
    assert assistant["tool_calls"] == [call | {"function": {"name": "f", "arguments": {"x": [1]}}}]
    assert tool == messages[2]
    assert call["function"]["arguments"] == '{"x": [1]}'  # the caller's own is untouched


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    """Clients send all fields, and templates ask whether a message has tool_calls."""
    reasoned = {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": None}
    [message] = checked_messages([reasoned])
    assert message == {"role": "assistant", "content": "", "reasoning": "why", "reasoning_content": "why"}
    [message] = checked_messages([{"role": "assistant", "content": "a", "tool_calls": [], "reasoning_content": "b"}])
    assert message == {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"}


def test_the_older_form_of_calls_becomes_the_one_that_templates_know() -> None:
    call = {"name": "f", "arguments": '{"x": [1]}'}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "function_call": call, "tool_calls": None},
        {"role": "function", "name": "f", "content": None},
        {"role": "assistant", "content": "a", "function_call": None},
        {"role": "assistant", "function_call": {"name": "g"}},
        {"role": "function", "name": "g", "content": [{"type": "text", "text": "3"}]},
    ]
    _, first, result, plain, second, other = checked_messages(messages)
    [f], [g] = first["tool_calls"], second["tool_calls"]
    assert (f["type"], f["function"]) == ("function", {"name": "f", "arguments": {"x": [1]}})
    assert g["function"] == {"name": "g", "arguments": {}}
    assert f["id"] != g["id"] and all(len(one["id"]) == 9 and one["id"].isalnum() for one in (f, g))
    assert result == {"role": "tool", "name": "f", "content": "", "tool_call_id": f["id"]}
    assert other == {"role": "tool", "name": "g", "content": "3", "tool_call_id": g["id"]}
    assert plain == {"role": "assistant", "content": "a"}
    assert not any("function_call" in message for message in (first, second))
    assert call["arguments"] == '{"x": [1]}'


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"role": "function", "content": "3"}], r"messages\[0\].name must be the name of the function, not None"),
        ([{"role": "assistant", "function_call": "f"}], "function_call must have a name and arguments, not 'f'"),
        (
            [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}],
            r"messages\[0\].function_call.arguments is not valid JSON",
        ),
        (
            [{"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]}],
            r"messages\[0\] has tool_calls and a function_call",
        ),
        ("hi", "messages must be a list of messages, not a str"),
        (["hi"], r"messages\[0\] must be an object with role and content, not 'hi'"),
        ([{"content": "x"}], r"messages\[0\].role must be one of .*, not None"),
        ([{"role": "king", "content": "x"}], "not 'king'"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        (
            [{"role": "user", "content": 3}],
            r"messages\[0\].content must be a string or a list of text parts, not 3",
        ),
        (
            [*HI, {"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[1\].content\[0\] .*not 'image_url'",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must have a function with a name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments is not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "arguments must be a JSON object",
        ),
    ],
)
def test_bad_messages(messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_messages(messages)


def test_tools_must_be_objects() -> None:
    with pytest.raises(ValueError, match="tools must be a list"):
        template(TEMPLATE).render(HI, tools=["f"])  # type: ignore[list-item]
