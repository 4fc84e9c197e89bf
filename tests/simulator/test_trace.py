"""Recorded loads: what each format means, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxvllm.simulator.trace import TraceWorkload
from tests.simulator.setups import one_pool

MOONCAKE = [
    {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]},
    {"timestamp": 3000, "input_length": 30, "output_length": 2},
    {"timestamp": 3500, "input_length": 30, "output_length": 0},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def written(directory: Path, name: str, text: str) -> Path:
    file = directory / name
    file.write_text(text)
    return file


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    return written(tmp_path, "conversation.jsonl", "\n".join(map(json.dumps, MOONCAKE)) + "\n")


def test_mooncake_names_the_blocks_that_prompts_share(mooncake: Path) -> None:
    first, second, third = TraceWorkload(mooncake).arrivals()
    assert [one.at for one in (first, second, third)] == [0.0, 1.0, 2.0]
    assert [one.num_prompt_tokens for one in (first, second, third)] == [600, 1100, 30]
    assert [one.answer.num_tokens for one in (first, second, third)] == [7, 5, 2]
    ours, others = first.symbols(), second.symbols()
    assert (ours[:512] == others[:512]).all() and not set(ours[512:]) & set(others[512:])
    assert not set(third.symbols()) & {*ours, *others}


def test_tables_share_nothing(tmp_path: Path) -> None:
    for name, text in (("burst.csv", BURSTGPT), ("azure.csv", AZURE)):
        first, second = TraceWorkload(written(tmp_path, name, text)).arrivals()
        assert not set(first.symbols()) & set(second.symbols())
    assert (first.num_prompt_tokens, first.answer.num_tokens, first.at) == (374, 44, 0.0)
    assert (second.num_prompt_tokens, second.answer.num_tokens) == (396, 109)
    assert second.at == pytest.approx(4.314579, abs=1e-6)


def test_a_rate_stretches_the_time_between_arrivals(mooncake: Path) -> None:
    trace = TraceWorkload(mooncake)
    assert trace.traffic.request_rate == pytest.approx(1.5)
    quicker = trace.at_rate(15.0, 3)
    assert [one.at for one in quicker.arrivals()] == pytest.approx([0.0, 0.1, 0.2])
    assert len(list(replace(trace, count=2).arrivals())) == 2


def test_a_trace_is_simulated(mooncake: Path) -> None:
    result = one_pool(max_model_len=2048).run(TraceWorkload(mooncake))
    assert result.ledger.num_ended == 3
    [pool] = result.pools
    assert pool.num_prefix_hits == 512


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("trace.txt", "", r"must be a \.jsonl file \(Mooncake\) or a \.csv file \(BurstGPT, Azure\)"),
        ("trace.jsonl", "", "has no request with a prompt and an answer"),
        ("trace.jsonl", '{"timestamp": 1}', r"is in no format that is known: KeyError\('input_length'\)"),
        ("trace.jsonl", "{", "is in no format that is known"),
        *[
            ("trace.jsonl", json.dumps(MOONCAKE[2] | {field: 77}).replace("77", number), f"line 1: {field} must be")
            for field in ("timestamp", "input_length", "output_length")
            for number in ("1e999", "NaN", "-1", "1" + 30 * "0")
        ],
        ("trace.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": [2**30]}), "line 1: each of hash_ids must be an integer"),
        *[
            ("trace.csv", BURSTGPT.replace("\n45,", f"\n{number},"), "request 2: Timestamp must be a number from 0 to")
            for number in ("1e999", "nan", "-1", "1e300")
        ],
        ("trace.csv", BURSTGPT.replace("1087", "-1"), "request 2: Request tokens must be an integer from 0 to"),
        ("trace.csv", "a,b\n1,2\n", r"is in no format that is known: KeyError\('Timestamp'\)"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        TraceWorkload(written(tmp_path, name, text))
