"""What a chat template gets: texts or parts, and messages of the system where it knows them."""

import pytest

from jaxvllm.text.chat_template import DEFAULT, ChatTemplate

TEXTS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
PARTS = """{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for message in rest %}<{{
message['role'] }}>{% set content = message['content'] %}{% for part in content | list %}[{{ part['text'] }}]{%
endfor %}{% endfor %}"""
BOTH = """{% for message in messages %}{% if message.content is string %}<{{ message.content }}>{% else %}{% for part in
message.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"""
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
HELLO = [{"role": "user", "content": "hello"}]


def render(source, messages, content_format=None, **options):
    template = ChatTemplate({DEFAULT: source}, {}, content_format)
    return template.render(messages, **dict(add_generation_prompt=False) | options)


@pytest.mark.parametrize(
    ("source", "messages", "format", "expected"),
    [
        (TEXTS, MESSAGES, None, "<user>a\nb"),
        (TEXTS, MESSAGES, "openai", "<user>[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]"),
        (PARTS, MESSAGES, None, "<user>[a][b]"),
        (PARTS, HELLO, None, "<user>[hello]"),
        (BOTH, MESSAGES, None, "[a][b]"),
        (BOTH, HELLO, None, "<hello>"),
        (BOTH, HELLO, "openai", "[hello]"),
        (BOTH, MESSAGES, "string", "<a\nb>"),
        # It loops over something else.
        (TEXTS + "{% for tool in tools or [] %}{{ tool.content }}{% endfor %}", MESSAGES, None, "<user>a\nb"),
    ],
)
def test_content_comes_as_the_template_takes_it(source, messages, format, expected):
    assert render(source, messages, format) == expected


@pytest.mark.parametrize("source", [TEXTS, PARTS, BOTH])
def test_the_last_message_is_continued_in_each_form(source):
    messages = [*MESSAGES, {"role": "assistant", "content": "so"}]
    prompt = render(source, messages, continue_final_message=True)
    assert prompt.endswith("so")


KNOWS = TEXTS + "{# developer #}"
FIRST = """{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}{%
set rest = messages %}{% endif %}{% for message in rest %}"""
REFUSES = (
    FIRST
    + "{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}<u>{{ message.content }}{% endfor %}"
)
DROPS = FIRST + "{% if message.role == 'user' %}<u>{{ message.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "roles", "expected"),
    [
        (KNOWS, "sdu", "<system>0<developer>1<user>2"),
        (TEXTS, "du", "<system>0<user>1"),
        (TEXTS, "sdu", "<system>0\n\n1<user>2"),
        (TEXTS, "sdudu", "<system>0\n\n1<user>2<system>3<user>4"),
        # Without developers nothing changes.
        (TEXTS, "ssu", "<system>0<system>1<user>2"),
        (REFUSES, "sdudu", "<s>0\n\n1\n\n3<u>2<u>4"),
        (REFUSES, "usu", "<s>1<u>0<u>2"),
        (DROPS, "uduu", "<s>1<u>0<u>2<u>3"),
        (DROPS, "sudu", "<s>0\n\n2<u>1<u>3"),
    ],
)
def test_developers_are_the_system_where_the_template_knows_none(source, roles, expected):
    names = {"s": "system", "d": "developer", "u": "user"}
    messages = [{"role": names[role], "content": str(index)} for index, role in enumerate(roles)]
    assert render(source, messages) == expected


def test_a_template_that_refuses_for_another_reason_says_so():
    source = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match="the chat template refused the messages: never"):
        render(source, [*HELLO, {"role": "system", "content": "be brief"}])


def test_a_call_without_content_has_an_empty_one():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert render(TEXTS, messages) == "<user>hello<assistant>"
    assert render(PARTS, messages) == "<user>[hello]<assistant>"
