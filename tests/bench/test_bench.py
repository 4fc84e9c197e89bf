"""`jaxvllm bench`, as a user types it, against a server that speaks OpenAI's protocol."""

import json
import re

import pytest

from jaxvllm.cli.bench import main
from tests.commands import exit_code_of

RANDOM = ["--random-input-len", "8", "--random-output-len", "6", "--random-vocab-size", "50", "--num-prompts", "4"]
FIRST_LINES = """\
============ Serving Benchmark Result ============
Successful requests:                     4
Failed requests:                         0
Maximum request concurrency:             2
Request rate configured (RPS):           500.00
Benchmark duration (s):                  #
Total input tokens:                      32
Total generated tokens:                  24
Request throughput (req/s):              #
Request goodput (req/s):                 #
Output token throughput (tok/s):         #
Peak output token throughput (tok/s):    #
Peak concurrent requests:                #
Total token throughput (tok/s):          #
---------------Time to First Token----------------
Mean TTFT (ms):                          #
Median TTFT (ms):                        #
P50 TTFT (ms):                           #
P99.9 TTFT (ms):                         #
-----Time per Output Token (excl. 1st token)------
"""
# What vLLM writes with --save-result, and what --save-detailed adds.
KEYS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms
p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms
p99_itl_ms""".split()
DETAILS = "input_lens output_lens ttfts itls start_times generated_texts errors".split()


@pytest.fixture
def bench(server):
    shared = ("--base-url", server.base_url, "--disable-tqdm")
    return lambda command, *flags: exit_code_of(main, [command, *shared, *map(str, flags)])


def test_the_table_is_the_one_that_people_know(bench, capsys):
    flags = ["--request-rate", 500, "--max-concurrency", 2, "--goodput", "ttft:10000", "e2el:10000"]
    assert bench("serve", *RANDOM, *flags, "--metric-percentiles", "50,99.9") == 0
    out, err = capsys.readouterr()
    pattern = re.escape(FIRST_LINES).replace(r"\#", r"\d+\.\d\d")
    table = "\n".join(line.rstrip() for line in out.splitlines()) + "\n"
    assert re.match(pattern, table), out
    assert table.endswith("=" * 50 + "\n") and {len(line) for line in out.splitlines()} <= {50, 51}
    for headline in ("Inter-token Latency", "Mean ITL (ms):", "P99.9 TPOT (ms):"):
        assert headline in out
    assert "E2EL" not in out, "only with --percentile-metrics"


def test_the_json_has_the_keys_that_scripts_read(bench, tmp_path, server):
    flags = ["--save-result", "--result-dir", tmp_path, "--metadata", "commit=abc", "--temperature", 0, "--seed", 3]
    assert bench("serve", *RANDOM, *flags) == 0
    [file] = tmp_path.iterdir()
    assert re.fullmatch(r"openai-infqps-fake-\d{8}-\d{6}\.json", file.name)
    result = json.loads(file.read_text())
    assert not [key for key in [*KEYS, "commit"] if key not in result]
    assert not [key for key in DETAILS if key in result]
    assert (result["request_rate"], result["model_id"], result["completed"]) == ("inf", "fake", 4)
    assert bench("serve", *RANDOM, *flags, "--save-detailed", "--result-filename", "all.json") == 0
    result = json.loads((tmp_path / "all.json").read_text())
    assert result["output_lens"] == [6] * 4 and result["input_lens"] == [8] * 4
    assert result["generated_texts"] == [" t0 t1 t2 t3 t4 t5"] * 4
    assert [len(gaps) for gaps in result["itls"]] == [5] * 4, "the last chunk, without text, is no token"
    trial, *bodies = server.bodies[:5]
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 6 for body in bodies)
    assert all(len(body["prompt"]) == 8 and max(body["prompt"]) < 50 for body in bodies), "token ids: exact lengths"
    assert trial["prompt"] == bodies[0]["prompt"][::-1], "the trial leaves no prompt in the prefix cache"
    assert bodies == server.bodies[6:], "the same seed asks the same"


def test_chat_sends_text_and_counts_the_servers_tokens(bench, server, capsys):
    flags = ["--backend", "openai-chat", "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", 2]
    lengths = ["--prefix-repetition-prefix-len", 5, "--prefix-repetition-suffix-len", 3, "--num-prompts", 6]
    assert bench("serve", *flags, *lengths, "--prefix-repetition-output-len", 2, "--extra-body", '{"x": 1}') == 0
    bodies = server.bodies[1:]
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert sorted(map(prompts.count, prompts)) == [1] * 6, "every prompt is its own"
    assert sorted(len([p for p in prompts if p[:5] == prefix]) for prefix in {p[:5] for p in prompts}) == [3, 3]
    assert all(body["max_completion_tokens"] == 2 and body["x"] == 1 and "ignore_eos" not in body for body in bodies)
    assert re.search(r"Total input tokens: +48 ", capsys.readouterr().out)


def test_prompts_from_files(bench, server, tmp_path, capsys):
    def turns(*texts):
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    sharegpt, custom = tmp_path / "sharegpt.json", tmp_path / "custom.jsonl"
    conversations = [turns("hello", "world"), turns("abc", "world"), turns("hello", "abc"), turns("alone"), {}]
    sharegpt.write_text(json.dumps([*conversations, turns("x" * 1025, "world"), turns("again", "an answer", "more")]))
    assert bench("serve", "--dataset-name", "sharegpt", "--dataset-path", sharegpt, "--num-prompts", 5) == 0
    asked = {(body["prompt"], body["max_tokens"]) for body in server.bodies}
    assert asked == {("hello", 5), ("again", 9)}, "what is too short or too long is left out, the rest asked again"
    server.bodies.clear()
    custom.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two", "output_tokens": 4}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", custom, "--num-prompts", 2]
    assert bench("serve", *flags, "--custom-output-len", -1) == 0
    assert {(body["prompt"], body["max_tokens"]) for body in server.bodies} == {("one", 3), ("two", 4)}
    custom.write_text('{"prompt": "one"}\n{"promt": "two"}\n')
    capsys.readouterr()
    assert bench("serve", *flags) == 2
    assert "custom.jsonl, line 2 must be an object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "flags", "lengths", "said"),
    [
        (2048, [], (1024, 128), ""),
        (1024, [], (896, 128), "the model takes 1024 tokens, so --random-input-len is 896, not 1024"),
        (512, [], (384, 128), "--random-input-len is 384, not 1024"),
        (288, [], (256, 32), "--random-input-len is 256, not 1024 and --random-output-len is 32, not 128"),
        (1024, ["--random-input-len", 1000], (1000, 24), "so --random-output-len is 24, not 128"),
        (1024, ["--random-output-len", 512], (512, 512), "so --random-input-len is 512, not 1024"),
        (1024, ["--random-prefix-len", 24], (896, 128), "--random-input-len is 872, not 1024"),
        (1024, ["--random-input-len", 1000, "--random-output-len", 24], (1000, 24), ""),
        (1024, ["--backend", "openai-chat"], (832, 128), "--random-input-len is 832, not 1024"),
        (1024, ["--backend", "openai-chat", "--random-input-len", 1000, "--random-output-len", 24], (1000, 24), ""),
    ],
)
def test_lengths_that_nobody_chose_fit_the_model(length, flags, lengths, said, bench, server, capsys):
    server.max_model_len = length
    assert bench("serve", *flags, "--num-prompts", 2) == 0
    for body in server.bodies:
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        assert (len(text), body.get("max_tokens") or body["max_completion_tokens"]) == lengths
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == (1 if said else 0)


def test_a_server_that_lists_no_models_gets_the_usual_lengths(bench, server, capsys):
    server.odd_paths = {"/v1/models"}
    flags = ["--model", "fake", "--num-prompts", 2, "--random-input-len", 9]
    assert bench("serve", *flags) == 0, capsys.readouterr().err
    assert {body["max_tokens"] for body in server.bodies} == {128}


@pytest.mark.parametrize("command", ["serve", "sweep"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--random-input-len", 1000, "--random-output-len", 25], "--random-output-len 25 may need 1025"),
        (["--random-input-len", 1024], "--random-input-len 1024 may need 1152"),
        (["--random-input-len", 600, "--random-output-len", 100, "--random-range-ratio", 0.9], "may need 1330"),
        (["--dataset-name", "custom", "--dataset-path", "x", "--custom-output-len", 1024], "1024 may need 1025"),
        (["--dataset-name", "sharegpt", "--dataset-path", "x", "--sharegpt-output-len", 1021], "1021 may need 2048"),
    ],
)
def test_lengths_that_cannot_fit_are_told_before_any_load(command, flags, said, bench, server, capsys, tmp_path):
    server.max_model_len = 1024
    more = ["--max-concurrencies", 1, "--output", tmp_path / "sweep"] if command == "sweep" else []
    assert bench(command, *flags, *more) == 2
    err = capsys.readouterr().err
    assert said in err and "the model takes 1024 tokens" in err and err.count("\n") == 1
    assert not server.bodies


def test_long_conversations_are_left_out_where_the_model_is_short(bench, server, tmp_path, capsys):
    server.max_model_len = 100
    file = tmp_path / "sharegpt.json"
    file.write_text(
        json.dumps([{"conversations": [{"value": "x" * length}, {"value": "answer"}]} for length in (50, 94, 95, 500)])
    )
    assert bench("serve", "--dataset-name", "sharegpt", "--dataset-path", file, "--num-prompts", 2) == 0
    assert {len(body["prompt"]) for body in server.bodies} == {50, 94}
    assert "--sharegpt-max-total-len is 100, not 2048" in capsys.readouterr().err


def test_no_more_at_a_time_than_asked(bench, server, tmp_path):
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "slow"}\n' * 6)
    flags = ["--dataset-name", "custom", "--dataset-path", custom, "--custom-output-len", 1, "--num-prompts", 6]
    assert bench("serve", *flags, "--max-concurrency", 2) == 0
    assert server.most_at_once == 2
    assert bench("serve", *flags) == 0
    assert server.most_at_once > 2


def test_failures_are_counted_and_the_trial_fails_at_once(bench, server, tmp_path, capsys):
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "refuse"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", custom]
    assert bench("serve", *flags) == 1
    assert capsys.readouterr().err == "jaxvllm bench: the server answers 400: temperature must be at most 2, not 3\n"
    custom.write_text("\n".join(f'{{"prompt": "{prompt}"}}' for prompt in ["hi", "cut", "fail", "refuse", "hi"]))
    seed = next(seed for seed in range(9) if _first(seed, 5) in (0, 4))  # the trial is to pass
    assert bench("serve", *flags, "--num-prompts", 5, "--seed", seed) == 1
    out, err = capsys.readouterr()
    assert re.search(r"Successful requests: +2 ", out) and re.search(r"Failed requests: +3 ", out)
    assert sorted(err.splitlines()) == [
        "a request failed: the server answers 400: temperature must be at most 2, not 3",
        "a request failed: the server broke off: the engine died",
        "a request failed: the server ended the stream before it was done",
    ]


def _first(seed, count):
    from numpy.random import default_rng

    return int(default_rng(seed).spawn(2)[0].permutation(count)[0])


def test_a_sweep_writes_a_line_and_draws_a_point_for_each_load(bench, tmp_path, capsys, server):
    lines, picture = tmp_path / "sweep.jsonl", tmp_path / "sweep.png"
    flags = ["--max-concurrencies", 1, 2, "--output", lines, "--plot", picture, "--metric-percentiles", "90"]
    assert bench("sweep", *RANDOM, *flags) == 0
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [result["max_concurrency"] for result in results] == [1, 2]
    assert all(result["completed"] == 4 and "p90_ttft_ms" in result and "ttfts" not in result for result in results)
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3 and out[1].split()[:4] == ["1", "at", "a", "time"]
    assert len({str(body["prompt"]) for body in server.bodies}) == 10, "no point finds the prompts of the one before"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "--request-rate: must be a number from 1e-06 to inf, not 0"),
        (["--burstiness", "0"], "--burstiness: must be a number from 0.05 to 1e+06, not 0"),
        (["--max-concurrency", "0"], "--max-concurrency: must be an integer from 1 to 10000000, not 0"),
        (["--num-prompts", "0"], "--num-prompts: must be an integer from 1 to 10000000, not 0"),
        (["--random-range-ratio", "1"], "--random-range-ratio: must be a number from 0 to 0.999, not 1"),
        (["--random-input-len", "0"], "may leave a prompt empty"),
        (["--random-vocab-size", "0"], "--random-vocab-size: must be an integer from 1 to 2147483647, not 0"),
        (["--goodput", "ttft"], "--goodput takes NAME:MILLISECONDS"),
        (["--goodput", "itl:3"], "--goodput takes NAME:MILLISECONDS"),
        (["--percentile-metrics", "ttft,tptt"], "not tptt"),
        (["--metric-percentiles", "101"], "numbers from 0 to 100"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["--metadata", "x"], "--metadata takes KEY=VALUE"),
        (["--dataset-name", "custom"], "give --dataset-path"),
        (["--dataset-path", "x"], "reads no file"),
        (["--tokenizer", "/no/such"], "must be a directory with a tokenizer.json"),
        (["--save-result", "--result-dir", "/no/such"], "is no directory"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(flags, message, bench, capsys, server):
    assert bench("serve", *flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxvllm bench") and message in err and err.count("\n") == 1
    assert not server.bodies, "and before anything is asked"


def test_a_sweep_needs_loads(bench, capsys, tmp_path):
    assert bench("sweep") == 2
    assert bench("sweep", "--request-rates", 1, "--max-concurrencies", 1) == 2
    assert bench("sweep", "--request-rates", 1, "--plot", tmp_path / "x.txt") == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
