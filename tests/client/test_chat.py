"""`jaxvllm chat` and `jaxvllm complete`, against a server that speaks OpenAI's protocol."""

import io
import json
import re

import pytest

from jaxvllm.cli import chat, complete
from jaxvllm.client.answer import Asker
from jaxvllm.client.api import Api
from jaxvllm.client.conversation import Conversation
from jaxvllm.client.markdown import split_blocks
from jaxvllm.client.repl import Repl
from jaxvllm.client.screen import Screen
from jaxvllm.client.server import Server
from tests.waiting import wait_until

ANSWER = " t0 t1 t2 t3 t4"
STATS = re.compile(
    r"^first token after \d+ ms, [\d.]+ tokens per second, 2 tokens in \(3 cached\), 5 out, [\d.]+ s in all$",
    re.MULTILINE,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def typed(*lines):
    """A person who types these lines, then Ctrl-D; an exception among them is raised in its turn."""
    rest = iter(lines)

    def read(prompt):
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def talk(server, *lines, out=None):
    """A conversation as a person types it; what stood on the screen, and what was said about it."""
    out, err = out or io.StringIO(), io.StringIO()
    conversation = Conversation()
    with Api(Server(server.base_url)) as api:
        Repl(Asker(api, Screen(out, err), {"model": "fake"}), conversation, typed(*lines)).run()
    return out.getvalue(), err.getvalue(), conversation


@pytest.mark.parametrize("command", [chat, complete])
def test_one_question_prints_one_answer_and_nothing_else(command, server, capsys):
    assert (
        command.main(["hi", "--base-url", server.base_url + "/v1", "--stats", "--temperature", "0", "--stop", "x"]) == 0
    )
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n", "the role, keep-alive comments and the usage are no text"
    assert STATS.search(err)
    [body] = server.bodies
    asked = {"prompt": "hi"} if command is complete else {"messages": [{"role": "user", "content": "hi"}]}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"model": "fake", "temperature": 0, "stop": ["x"], **asked, **stream}, "nothing the user did not set"


def test_standard_input_is_the_question_and_the_system_message_comes_first(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert (
        chat.main(["--base-url", server.base_url, "--system", "Be brief.", "--model", "other", "--max-tokens", "2"])
        == 0
    )
    out, err = capsys.readouterr()
    assert out == " t0 t1\n"
    [body] = server.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert body["model"] == "other" and body["max_tokens"] == 2


def test_a_cut_answer_is_said_to_be_cut(server, capsys):
    assert complete.main(["hi", "--base-url", server.base_url, "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == " t0 t1\n"
    assert "--max-tokens" in err


@pytest.mark.parametrize(
    ("prompt", "flags", "most"),
    [
        ("hi", [], 98),
        ("hi", ["--max-tokens", "3"], 3),
        ("x" * 100, [], None),  # the server says what is wrong with it
    ],
)
def test_a_completion_may_be_as_long_as_there_is_room(prompt, flags, most, server):
    server.max_model_len = 100
    assert complete.main([prompt, "--base-url", server.base_url, *flags]) == 0
    [body] = server.bodies
    assert body.get("max_tokens") == most, "OpenAI's 16 tokens are half a sentence"


def test_a_completion_needs_no_tokenize(server, capsys):
    server.odd_paths = {"/tokenize"}
    assert complete.main(["hi", "--base-url", server.base_url]) == 0, capsys.readouterr().err
    assert "max_tokens" not in server.bodies[0]


def test_a_chat_is_as_long_as_the_server_lets_it(server):
    server.max_model_len = 100
    assert chat.main(["hi", "--base-url", server.base_url]) == 0
    assert "max_tokens" not in server.bodies[0]


@pytest.mark.parametrize(
    ("question", "told", "printed"),
    [
        ("refuse", "jaxvllm chat: the server answers 400: temperature must be at most 2, not 3", ""),
        ("fail", "jaxvllm chat: the server broke off: the engine died", " t0 t1\n"),
        ("cut", "jaxvllm chat: the server ended the stream before it was done", " t0 t1\n"),
    ],
)
def test_an_error_of_the_server_is_one_line(question, told, printed, server, capsys):
    assert chat.main([question, "--base-url", server.base_url]) == 1
    out, err = capsys.readouterr()
    assert err.strip() == told
    assert out == printed


def test_no_server_wrong_key_and_wrong_flags(server, capsys, monkeypatch):
    assert chat.main(["hi", "--port", "1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
    server.api_key = "secret"
    assert chat.main(["hi", "--base-url", server.base_url]) == 1
    assert capsys.readouterr().err == "jaxvllm chat: the server answers 401: wrong API key\n"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert chat.main(["hi", "--base-url", server.base_url]) == 0
    assert chat.main(["hi", "--base-url", "127.0.0.1:8000"]) == 2
    assert chat.main(["  ", "--base-url", server.base_url]) == 2
    with pytest.raises(SystemExit) as left:
        chat.main(["hi", "--no-such-flag"])
    assert left.value.code == 2


def test_a_conversation_remembers_until_it_is_cleared(server, tmp_path):
    file = tmp_path / "saved.json"
    out, err, _ = talk(
        server, "one", "/system Be brief.", "two", f"/save {file}", "/clear", "three", "/what", "/exit", "never"
    )
    assert out == f"{ANSWER}\n" * 3
    first, second, third = (body["messages"] for body in server.bodies)
    turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": ANSWER}]
    system = [{"role": "system", "content": "Be brief."}]
    assert first == turn[:1]
    assert second == [*system, *turn, {"role": "user", "content": "two"}]
    assert third == [*system, {"role": "user", "content": "three"}]
    saved = json.loads(file.read_text())
    assert saved["model"] == "fake" and [message["content"] for message in saved["messages"]] == [
        "Be brief.", "one", ANSWER, "two", ANSWER,
    ]  # fmt: skip
    assert "/clear" in err, "an unknown command lists those there are"


def test_a_failed_question_is_forgotten_and_the_talk_goes_on(server):
    out, err, conversation = talk(server, "refuse", "/save /no/such/folder/x", "hi")
    assert "temperature must be" in err and "No such file" in err
    assert [message["content"] for message in conversation.messages] == ["hi", ANSWER]


def test_a_question_without_an_answer_is_forgotten():
    conversation = Conversation()
    conversation.keep("hi", "")
    assert conversation.messages == []


def test_control_c_stops_the_answer_and_closes_the_connection(server, monkeypatch):
    class Impatient(Terminal):
        def write(self, text):
            super().write(text)
            if text == " t1":
                raise KeyboardInterrupt
            return len(text)

    out, err, conversation = talk(server, KeyboardInterrupt(), "slow", "hi", out=Impatient())
    assert "(stopped)" in err and "Ctrl-D" in err
    assert out.startswith(" t0 t1\n")
    assert [message["content"] for message in conversation.messages[:2]] == ["slow", " t0 t1"]
    wait_until(lambda: server.disconnects >= 1, lambda: "the server was not told")


def test_what_a_model_says_cannot_command_a_terminal():
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        Screen(out, io.StringIO()).text("a\x1b[2Jb\n")
    assert terminal.getvalue() == "a␛[2Jb\n"
    assert pipe.getvalue() == "a\x1b[2Jb\n", "a file gets the bytes as they are"


MARKDOWN = "# Head\n\nSome *words*.\n\n```py\nx = 1\n\ny = [2]\n```\n\nThe end"


def test_blocks_of_markdown_are_whole_at_blank_lines_outside_of_code():
    blocks, rest = [], ""
    for letter in MARKDOWN:
        whole, rest = split_blocks(rest + letter)
        blocks += [whole] if whole.strip() else []
    assert "".join([*blocks, rest]).replace("\n", "") == MARKDOWN.replace("\n", "")
    assert [block.split("\n")[0] for block in blocks] == ["# Head", "Some *words*.", "```py"]
    assert rest == "The end"


def test_markdown_is_rendered_once_and_only_in_a_terminal():
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        screen = Screen(out, io.StringIO(), renders_markdown=True)
        for at in range(0, len(MARKDOWN), 5):
            screen.text(MARKDOWN[at : at + 5])
        screen.end()
        screen.text("again")
        screen.end()
    assert pipe.getvalue() == MARKDOWN + "\nagain\n"
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert "```" not in shown and "*" not in shown
    for words in ("Head", "Some words.", "x = 1", "y = [2]", "The end", "again"):
        assert words in shown
