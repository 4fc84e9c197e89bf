"""`jaxvllm bench latency`, `throughput` and `startup`, as a user types them, with the embedded model."""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from jaxvllm import LLM
from jaxvllm.bench.drafts import DraftTotals
from jaxvllm.bench.offline import startup
from jaxvllm.bench.offline.latency import Latencies
from jaxvllm.bench.offline.padding import Padding
from jaxvllm.bench.offline.startup import Startups
from jaxvllm.cli.bench import main
from jaxvllm.config import EngineConfig
from tests.bench.test_bench import KEYS as SERVE_KEYS
from tests.commands import exit_code_of
from tests.quick import quick_compilation
from tests.run_cache import run_cache

SMALL = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, row_buckets=(4,), token_buckets=(16,))
ORIGIN = {"date", "command", "model", "device", "versions"}
PADDING = Padding(tokens=10_000, padding_tokens=1234, ended_tokens=0, rows=100, padding_rows=7)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with quick_compilation():
        llm = LLM(**SMALL, num_pages=40, enable_prefix_caching=False, compilation_cache=run_cache(), warm_up="full")
    with llm:
        yield llm


@pytest.fixture
def bench(engine, monkeypatch):
    """Runs a command on the engine that all tests share, whatever engine its flags ask for."""
    configs = []

    def shared(config):
        configs.append(config)
        return nullcontext(engine)

    monkeypatch.setattr(LLM, "from_config", shared)

    def run(*argv):
        code = exit_code_of(main, [*map(str, argv), "--disable-tqdm"])
        return code, configs

    return run


def test_latency_prints_vllms_lines_and_writes_its_keys(bench, capsys, tmp_path):
    path = tmp_path / "latency.json"
    sizes = ["--input-len", 5, "--output-len", 6, "--batch-size", 3, "--num-iters-warmup", 1, "--num-iters", 4]
    code, [config] = bench("latency", *sizes, "--output-json", path, "--max-num-seqs", 7)
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    first = ["Avg latency", "Std latency", *(f"{share}% percentile latency" for share in (10, 25, 50, 75, 90, 99))]
    for line, name in zip(lines, first, strict=False):
        assert re.fullmatch(rf"{name}: \d+\.\d{{6}} seconds", line)
    assert re.fullmatch(
        r"Padding: \d+\.\d% of \d+ computed tokens(, and \d+\.\d% were of rows that had ended)?", lines[8]
    )
    assert config == EngineConfig(max_num_seqs=7, enable_prefix_caching=False), "as in vLLM"
    result = json.loads(path.read_text())
    assert set(result) == ORIGIN | {"avg_latency", "std_latency", "latencies", "percentiles", "padding"}
    assert len(result["latencies"]) == 4 and list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    padding = result["padding"]
    wanted = 4 * 3 * (5 + 6 - 1)  # the last token of an answer is computed by no step
    assert padding["tokens"] == wanted + padding["padding_tokens"] + padding["ended_tokens"]


@pytest.mark.parametrize("flags", [["--n", 2], ["--n", 2, "--use-beam-search"], ["--disable-detokenize"]])
def test_latency_of_other_requests(bench, capsys, flags):
    sizes = ["--input-len", 5, "--output-len", 4, "--batch-size", 2, "--num-iters-warmup", 0, "--num-iters", 1]
    assert bench("latency", *sizes, *flags)[0] == 0
    assert "Avg latency: " in capsys.readouterr().out


def test_throughput_prints_vllms_lines_and_writes_its_keys(bench, capsys, tmp_path):
    path = tmp_path / "throughput.json"
    flags = ["--num-prompts", 6, "--random-input-len", 9, "--random-output-len", 5, "--output-json", path]
    assert bench("throughput", *flags)[0] == 0
    out = capsys.readouterr().out
    assert re.match(r"Throughput: \d+\.\d\d requests/s, \d+\.\d\d total tokens/s, \d+\.\d\d output tokens/s\n", out)
    assert "Total num prompt tokens:  54\nTotal num output tokens:  30\nPadding: " in out
    result = json.loads(path.read_text())
    vllms = {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"}
    assert vllms | ORIGIN <= set(result)
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 84)
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
    assert result["output_tokens_per_second"] == pytest.approx(30 / result["elapsed_time"])


def test_throughput_takes_the_data_sets_of_bench_serve(bench, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "One day, Anna"}) + "\n")
    flags = ["--dataset-name", "custom", "--dataset-path", file, "--output-len", 3, "--num-prompts", 4]
    assert bench("throughput", *flags)[0] == 0
    assert "Total num output tokens:  12\n" in capsys.readouterr().out


def test_throughput_shortens_lengths_that_nobody_chose(bench, capsys):
    assert bench("throughput", "--num-prompts", 1, "--output-len", 4)[0] == 0
    captured = capsys.readouterr()
    assert "the model takes 64 tokens, so --random-input-len is 60, not 1024" in captured.err
    assert "Total num output tokens:  4\n" in captured.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--input-len", 60, "--output-len", 10], "exceed the 64 tokens that the model takes"),
        (["latency", "--batch-size", 0], "--batch-size: must be an integer from 1 to 10000000, not 0"),
        (["latency", "--num-iters-warmup", -1], "--num-iters-warmup: must be an integer from 0 to 10000000, not -1"),
        (["latency", "--output-json", "/no/such/place/x.json"], "must be in a directory that exists"),
        (["throughput", "--num-prompts", 0], "--num-prompts: must be an integer from 1 to 10000000, not 0"),
        (["throughput", "--input-len", 60, "--output-len", 10], "the model takes 64 tokens"),
        (["throughput", "--dataset-name", "custom", "--input-len", 6], "--input-len 6 is for random prompts"),
        (["throughput", "--dataset-name", "sharegpt", "--sharegpt-max-total-len", 64], "give --dataset-path"),
        (["startup", "--num-iters-cold", -1], "--num-iters-cold: must be an integer from 0 to 10000000, not -1"),
        (["startup", "--max-num-seqs", 0], "--max-num-seqs: must be an integer from 1 to 1048576, not 0"),
    ],
)
def test_a_mistake_is_one_line(bench, capsys, argv, message):
    code, _ = bench(*argv)
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("jaxvllm bench") and message in err and err.count("\n") == 1


def test_a_profile_has_the_names_of_our_code(bench, capsys, tmp_path):
    sizes = ["--input-len", 5, "--output-len", 4, "--batch-size", 2, "--num-iters-warmup", 1]
    assert bench("latency", *sizes, "--profile", tmp_path / "new" / "trace")[0] == 0
    out = capsys.readouterr().out
    assert "Avg latency" not in out, "tracing takes time"
    [xplane] = tmp_path.rglob("*.xplane.pb")
    assert str(xplane) in out
    content = xplane.read_bytes()
    for scope in (b"/attention/", b"/ffn/", b"/logits/", b"/sample/"):
        assert scope in content
    [events] = tmp_path.rglob("*.trace.json.gz")
    assert json.loads(gzip.decompress(events.read_bytes()))["traceEvents"]


def test_padding_is_told_in_a_line():
    assert PADDING.line() == "Padding: 12.3% of 10,000 computed tokens"
    ended = Padding(tokens=200, padding_tokens=20, ended_tokens=30, rows=10, padding_rows=1)
    assert ended.line() == "Padding: 10.0% of 200 computed tokens, and 15.0% were of rows that had ended"
    assert Padding(0, 0, 0, 0, 0).share == 0.0


def test_latencies_are_summed_up_as_vllm_does():
    result = Latencies((0.1, 0.2, 0.3, 0.4), PADDING, DraftTotals(0, 0, 0, ()))
    assert result.lines()[:2] == ["Avg latency: 0.250000 seconds", "Std latency: 0.111803 seconds"]
    assert result.lines()[-1] == PADDING.line() and "spec_decode_num_drafts" not in result.record()
    drafted = replace(
        result, drafts=DraftTotals(drafts=4, draft_tokens=12, accepted_tokens=6, accepted_per_pos=(3, 2, 1))
    )
    assert drafted.lines()[:-1] == result.lines() and drafted.lines()[-1] == drafted.drafts.line()
    assert drafted.record() == {**result.record(), **drafted.drafts.record()}
    assert result.percentiles[50] == pytest.approx(0.25) and result.percentiles[90] == pytest.approx(0.37)


def test_startups_are_summed_up_as_vllm_does():
    starts = [
        {"startup": 1.0, "first_token": 2.0, "compiled": 3.0},
        {"startup": 2.0, "first_token": 4.0, "compiled": 9.0},
    ]
    result = Startups(cold=starts, warm=())
    lines = result.lines()
    assert "COLD STARTUP:" in lines and "WARM STARTUP:" not in lines
    assert lines[5:8] == [
        "Avg startup time: 1.50 seconds",
        "Avg time to first token: 3.00 seconds",
        "Avg time to the last program: 6.00 seconds",
    ]
    assert "  75%: 1.75 seconds" in lines
    record = result.record()
    assert record["avg_cold_startup_time"] == 1.5 and record["cold_startup_times"] == [1.0, 2.0]
    assert record["cold_first_token_percentiles"]["50"] == 3.0
    assert not [key for key in record if key in SERVE_KEYS or "warm" in key]


@pytest.mark.slow
def test_startup_starts_processes(capsys, tmp_path, monkeypatch):
    """The warm start has the programs that the cold one compiled, where a user's would need a start to warm up."""
    monkeypatch.setattr(startup.tempfile, "TemporaryDirectory", lambda: nullcontext(str(tmp_path / "cache")))
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--row-buckets", "4", "--token-buckets", "16"]
    iterations = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    path = tmp_path / "startup.json"
    argv = ["startup", *iterations, *sizes, "--max-model-len", "64", "--output-json", str(path), "--disable-tqdm"]
    assert main(argv) == 0
    assert "WARM STARTUP:" in capsys.readouterr().out
    result = json.loads(path.read_text())
    for kind in ("cold", "warm"):
        [ready], [first] = result[f"{kind}_startup_times"], result[f"{kind}_first_token_times"]
        [last] = result[f"{kind}_compiled_times"]
        assert 0 < ready < first < last


@pytest.mark.slow
def test_a_start_that_fails_is_an_error(capfd):
    argv = ["startup", "--num-iters-cold", "1", "--num-iters-warm", "0", "--num-iters-warmup", "0"]
    assert main([*argv, "--model", "/no/such/model", "--disable-tqdm"]) == 2
    err = capfd.readouterr().err
    assert "an engine did not get to 'startup', and ended with status 1" in err
