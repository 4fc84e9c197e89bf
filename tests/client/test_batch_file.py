"""`jaxvllm run-batch`: OpenAI batch files."""

import io
import json
import re

import pytest

from jaxvllm.cli.run_batch import main
from jaxvllm.client.batch_file import BatchAnswer


def line(custom_id, url="/v1/completions", method="POST", **body):
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


@pytest.fixture
def run(server, tmp_path):
    def run(*lines, flags=()):
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        argv = [
            "-i",
            str(tmp_path / "in.jsonl"),
            "-o",
            str(tmp_path / "out.jsonl"),
            "--base-url",
            server.base_url,
            *flags,
        ]
        code = main(argv)
        return code, [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]

    return run


def test_answers_stand_in_the_order_of_the_questions(run, server):
    chat = line("b", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], model="other")
    code, answers = run(line("a", prompt="slow"), chat, "", line("c", prompt="busy"))
    assert code == 0
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"], "busy was asked again"
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"] == "cmpl-1" and answer["response"]["body"]["usage"]
    assert answers[1]["response"]["body"]["choices"][0]["message"]["content"] == " t0 t1 t2 t3 t4"
    assert {body["model"] for body in server.bodies} == {"fake", "other"}, "the server's model where the line has none"


def test_every_endpoint_that_generates_may_be_asked(run, server, capsys):
    messages = [{"role": "user", "content": "hi"}]
    code, answers = run(
        line("a", prompt="hi"),
        line("b", "/v1/chat/completions", messages=messages),
        line("c", "/v1/responses", input="hi"),
        line("d", "/v1/messages", messages=messages, max_tokens=3),
        line("e", "/v1/score", input="hi"),
    )
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [None] * 4 + ["invalid_url"]
    assert sorted(server.paths) == ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
    captured = capsys.readouterr()
    summary = r"5 requests, 4 ok, 1 failed, 8 tokens in, 16 tokens out, \d+\.\d\d s\n"
    assert code == 1 and re.search(summary, captured.err)
    assert not captured.out


@pytest.mark.parametrize(
    ("usage", "count"),
    [
        ({"input_tokens": 1, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}, 7),
        ({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}, 5),
        # As gateways write it, which put the names of both APIs into one answer.
        ({"prompt_tokens": 5, "cache_read_input_tokens": 4}, 5),
        ({"input_tokens": "many"}, 0),
        (None, 0),
    ],
)
def test_prompts_are_counted_with_what_was_cached(usage, count):
    assert BatchAnswer("a", 200, "r", {"usage": usage}).num_prompt_tokens == count


def test_answers_may_go_to_standard_output_and_nothing_else_does(server, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO(line("a", prompt="hi") + "\n" + line("b", prompt="refuse") + "\n"))
    monkeypatch.chdir(tmp_path)
    assert main(["-i", "-", "-o", "-", "--base-url", server.base_url]) == 1
    captured = capsys.readouterr()
    assert [json.loads(text)["custom_id"] for text in captured.out.splitlines()] == ["a", "b"]
    assert "1 of 2 requests failed" in captured.err and "2 requests, 1 ok, 1 failed" in captured.err
    assert not list(tmp_path.iterdir())


def test_a_bad_line_is_an_error_of_its_own(run, capsys):
    code, answers = run(
        line("a", prompt="hi"),
        "{not json",
        '["list"]',
        line("a", prompt="hi"),
        line("d", url="/v1/files"),
        line("e", method="GET"),
        line("f", prompt="hi", stream=True),
        json.dumps({"custom_id": "g", "method": "POST", "url": "/v1/completions"}),
        json.dumps({"method": "POST"}),
        line("i", prompt="refuse"),
        line("j", prompt="hi"),
    )
    assert code == 1
    assert [answer["custom_id"] for answer in answers] == ["a", None, None, "a", "d", "e", "f", "g", None, "i", "j"]
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [
        None,
        "invalid_json_line",
        "invalid_json_line",
        "duplicate_custom_id",
        "invalid_url",
        "invalid_method",
        "invalid_request",
        "missing_required_parameter",
        "missing_required_parameter",
        None,
        None,
    ]
    refused = answers[9]["response"]
    assert refused["status_code"] == 400 and "temperature" in refused["body"]["error"]["message"], "as OpenAI has it"
    assert all(answer["error"] is None or answer["response"] is None for answer in answers)
    assert "9 of 11 requests failed" in capsys.readouterr().err


def test_no_more_at_a_time_than_asked(run, server):
    code, answers = run(*(line(str(i), prompt="hi") for i in range(20)), flags=["--max-concurrency", "3"])
    assert code == 0 and len(answers) == 20
    assert 1 <= server.most_at_once <= 3


def test_what_is_wrong_is_told_before_anything_is_written(server, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text(line("a", prompt="hi"))
    assert main(["-i", str(file), "-o", str(file), "--base-url", server.base_url]) == 2
    assert main(["-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), "--base-url", server.base_url]) == 2
    assert main(["-i", str(file), "-o", str(tmp_path / "out"), "--port", "1"]) == 1
    assert not (tmp_path / "out").exists()
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert file.read_text() == line("a", prompt="hi")
