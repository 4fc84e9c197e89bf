"""`jaxvllm simulate` and `jaxvllm bench auto-tune` from the command line."""

import json
from pathlib import Path

import pytest

from jaxvllm.cli import main
from jaxvllm.simulator.measured_cost import BucketTime, MeasuredCost
from tests.commands import exit_code_of
from tests.engine.tiny import write_tiny_checkpoint
from tests.simulator.test_measured_cost import TABLE

pytestmark = pytest.mark.usefixtures("quick_programs")
SMALL = ["--num-prompts", "40", "--random-input-len", "40", "--random-output-len", "10"]
H100 = ["Llama-3.1-8B", "--device", "h100", "--max-model-len", "1024", "--num-pages", "500", *SMALL]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    file.write_text(TABLE.to_json())
    return file


def test_a_simulation_prints_the_table_of_bench_serve_and_one_for_each_pool(capsys):
    assert main(["simulate", *H100, "--request-rate", "20", "--goodput", "ttft:50"]) == 0
    out = capsys.readouterr().out
    for line in ("Successful requests:                     40", "Request goodput", "P99 TTFT (ms):", "P90 E2EL (ms):"):
        assert line in out
    for line in (
        "Pool engine, 1 replica",
        "Peak KV pages in use (%):",
        "Preemptions:",
        "Requests simulated per second:",
    ):
        assert line in out


def test_json_has_the_keys_of_bench_serve(capsys):
    assert main(["simulate", *H100, "--pools", "1+2", "--kv-bandwidth", "50", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 40 and result["mean_ttft_ms"] > 0 and result["p99_itl_ms"] > 0
    assert {name: pool["num_replicas"] for name, pool in result["pools"].items()} == {"prefill": 1, "decode": 2}


def test_half_the_efficiency_is_twice_the_time(capsys):
    times = []
    for share in ("1", "0.5"):
        one = ["--num-prompts", "1", "--host-ms", "0.001", "--efficiency", share, "--json"]
        assert main(["simulate", *H100, *one]) == 0
        times.append(json.loads(capsys.readouterr().out)["mean_tpot_ms"])
    assert times[1] == pytest.approx(2 * times[0], rel=1e-3)


def test_a_table_knows_its_model_and_device(table, capsys):
    assert main(["simulate", "--table", str(table), "--num-pages", "500", *SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model_id"], result["completed"]) == ("demo", 40)


def test_a_picture_is_drawn(table, tmp_path, capsys):
    file = tmp_path / "load.png"
    load = ["--load", "conversations", "--request-rate", "30", "--answer-len", "8", "--plot", str(file)]
    assert main(["simulate", "--table", str(table), "--num-pages", "500", *SMALL, *load]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["demo"], "say how quick the devices are: give --device, such as h100, or --table"),
        (["demo", "--device", "cpu"], "the rates of device cpu are not known: name a chip such as h100, or measure"),
        (["demo", "--device", "h100", "--pools", "2"], "--pools must be P+D, such as 2+6, not 2"),
        (["demo", "--device", "h100", "--pools", "1+1", "--mesh", "2x1"], "pools say how many replicas there are"),
        (["demo", "--device", "h100", "--mesh", "2x1x1"], "mesh 2x1x1 has stages, which are not simulated"),
        (["demo", "--device", "h100", "--kv-latency-ms", "3"], "--kv-bandwidth and --kv-latency-ms are of --pools"),
        (
            ["demo", "--device", "h100", "--trace", "no.txt"],
            "--trace no.txt must be a .jsonl file (Mooncake) or a .csv",
        ),
        (["demo", "--device", "h100", "--trace", "no.csv"], "No such file or directory: 'no.csv'"),
        (["demo", "--device", "h100", "--efficiency", "2"], "--efficiency: must be a number from 0.001 to 1, not 2.0"),
        (["Llama-3.1-70B", "--device", "l4"], "leaves no memory for keys and values on a mesh of 1x1 l4: raise the M"),
        (
            ["demo", "--device", "h100", "--turns", "0", "--load", "conversations"],
            "--turns: must be an integer from 1 to 10000, not 0",
        ),
        (
            ["demo", "--device", "h100", "--pools", "1+1", "--no-enable-prefix-caching"],
            "the decode pool gets its pages by the prefix cache: leave it on",
        ),
    ],
)
def test_a_wrong_option_is_an_error(argv, error, capsys):
    assert exit_code_of(main, ["simulate", *argv]) == 2
    assert error in capsys.readouterr().err


def test_auto_tune_prints_a_row_for_all_options_and_the_best(table, tmp_path, capsys):
    output = tmp_path / "tuned.json"
    search = ["--goodput", "ttft:200", "tpot:20", "--num-seqs-list", "4", "16", "--num-batched-tokens-list", "32"]
    words = ["bench", "auto-tune", "--table", str(table), "--num-pages", "500", *search, *SMALL]
    assert main([*words, "--disaggregate", "2", "--output-json", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        [seqs, "32", pools] for seqs in ("4", "16") for pools in ("-", "1+1")
    ]
    assert lines[-1].startswith("best: max_num_seqs ")
    assert len(json.loads(output.read_text())["results"]) == 4
    assert main([*words[:6], "--goodput", "ttft:0.001", *search[3:], *SMALL]) == 1
    assert "no options keep these limits at any rate" in capsys.readouterr().out


def test_real_runs_have_the_last_word(tmp_path, capsys):
    model = write_tiny_checkpoint(tmp_path / "tiny")
    # Steps of a nanosecond: no real engine is as quick as this one.
    quick = MeasuredCost((BucketTime(4, 4, 1e-9),), (BucketTime(16, 4, 1e-9),), *[0.0] * 13, model=str(model))
    table, output = tmp_path / "table.json", tmp_path / "tuned.json"
    table.write_text(quick.to_json())
    words = ["bench", "auto-tune", "--table", str(table)]
    words += "--num-seqs-list 2 4 --num-batched-tokens-list 16 --token-buckets 16 --max-decode-burst 1".split()
    words += "--max-model-len 64 --num-pages 33 --num-prompts 6 --random-input-len 20 --random-output-len 5".split()
    words += ["--real-runs", "1", "--output-json", str(output)]
    assert main([*words, "--goodput", "ttft:1e9"]) == 0
    out = capsys.readouterr().out
    assert "the best 1, simulated and on this machine" in out
    assert out.splitlines()[-1].startswith("best: max_num_seqs 4") and out.endswith("simulated and on this machine\n")
    first, second = json.loads(output.read_text())["results"]
    assert first["measured"]["good"] == first["measured"]["completed"] == 6 and "measured" not in second
    assert main([*words, "--goodput", "ttft:0.0001"]) == 1
    out = capsys.readouterr().out
    assert "no real run kept these limits" in out and "\nbest: " not in out


def test_a_load_without_lengths_fits_the_model(table, capsys):
    assert main(["simulate", "--table", str(table), "--max-model-len", "512", "--num-prompts", "5", "--json"]) == 0
    captured = capsys.readouterr()
    assert "jaxvllm simulate: the model takes 512 tokens, so --random-input-len is 384, not 1024" in captured.err
    result = json.loads(captured.out)
    assert (result["completed"], result["failed"]) == (5, 0)


def test_sizes_that_were_not_measured_are_told(table, capsys):
    search = ["--goodput", "ttft:1e9", "--num-batched-tokens-list", "64", *SMALL]
    words = ["bench", "auto-tune", "--table", str(table), *search, "--num-seqs-list"]
    num_rows, num_tokens = TABLE.largest
    assert main([*words, str(num_rows)]) == 0
    assert not capsys.readouterr().err
    assert main([*words, str(num_rows + 1)]) == 0
    assert f"the table has steps of at most {num_rows} requests and {num_tokens} tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--disaggregate", "1"], "--disaggregate: must be an integer from 2 to 1024, not 1"),
        (["--disaggregate", "2", "--real-runs", "1"], "--real-runs needs one pool"),
        (["--kv-latency-ms", "1"], "--kv-bandwidth and --kv-latency-ms are of --disaggregate N, which is not given"),
        (["--real-runs", "-1"], "--real-runs: must be an integer from 0 to 1000, not -1"),
        (["--real-runs", "1", "--mesh", "64x1"], "mesh 64x1 needs 64 devices"),
        (["--model", "Llama-3.1-8B"], "has the step times of demo, not of Llama-3.1-8B: leave out the model"),
        (["--goodput", "tftt:200"], "--goodput takes NAME:MILLISECONDS with a name of ttft, tpot, e2el, not tftt:200"),
        (["--num-seqs-list", "64", "--num-batched-tokens-list", "32"], "a step needs a token for each request"),
        (["--random-input-len", "3000"], "--random-input-len 3000 may need 3128: give lengths that fit"),
        (["--load", "conversations", "--question-len", "2000", "--num-prompts", "4"], "none of the 4 requests can run"),
        (
            ["--device", "h100", "--real-runs", "1"],
            "--real-runs runs on the cpu at hand, and the simulation is of h100",
        ),
    ],
)
def test_auto_tune_refuses_what_it_cannot_run(words, error, table, capsys):
    assert exit_code_of(main, ["bench", "auto-tune", "--table", str(table), "--goodput", "ttft:1", *words]) == 2
    assert error in capsys.readouterr().err
