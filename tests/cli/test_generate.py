"""`jaxvllm generate`, as a user types it."""

import io
import json
import re
import subprocess
import sys

import pytest

from jaxvllm.cli import main as jaxvllm
from jaxvllm.cli.generate import main
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("quick_programs")

CLOSING_LINE = re.compile(
    r"^(\d+) requests, (\d+) tokens in, (\d+) tokens out, [\d.]+ s, [\d.]+ tokens per second; "
    r"first token after [\d.]+ s, [\d.]+ s after the process started$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def engine_flags(tmp_path_factory):
    """The embedded model with two small programs, compiled once for all tests here."""
    flags = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--row-buckets", "2", "--token-buckets", "16"]
    return [*flags, "--compilation-cache", str(tmp_path_factory.mktemp("cache")), "--temperature", "0"]


def test_several_prompts_print_their_texts_and_a_closing_line(engine_flags, capsys):
    prompts = ["Once upon a time", "One morning", "The little dog"]
    assert main([*prompts, "--max-tokens", "6", "--ignore-eos", "--show-batch", *engine_flags]) == 0
    out = capsys.readouterr().out
    for index, prompt in enumerate(prompts):
        assert f"[{index}] {prompt}" in out
    requests, _, tokens_out = CLOSING_LINE.search(out).groups()
    assert (requests, tokens_out) == ("3", "18")
    timeline = dict(re.findall(r"^  (.{20}) \|(.*)$", out, re.MULTILINE))
    assert timeline["Once upon a time    "].startswith("P#####")
    assert timeline["The little dog      "].startswith("   "), "two slots: the third waits"
    assert set(timeline["requests            "]) <= set("0123456789")


def test_json_and_streamed_text_agree(engine_flags, capsys):
    argv = ["Once upon a time", "--max-tokens", "8", *engine_flags]
    assert main([*argv, "--json", "--logprobs", "1"]) == 0
    output, totals = map(json.loads, capsys.readouterr().out.splitlines())
    [completion] = output["outputs"]
    assert len(completion["token_ids"]) == len(completion["logprobs"]) == totals["num_output_tokens"]
    assert main(argv) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith(f"Once upon a time{completion['text']}\n")
    assert CLOSING_LINE.search(streamed)[3] == str(totals["num_output_tokens"])


def test_prompts_from_standard_input_and_chat(engine_flags, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a story.\n\nWhat is 2 + 2?\n"))
    assert main(["--prompts-file", "-", "--chat", "--max-tokens", "3", "--json", *engine_flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "two requests and the totals; empty lines are no prompts"
    assert "Tell me a story." in json.loads(lines[0])["prompt"]
    assert json.loads(lines[0])["prompt"] != "Tell me a story.", "the chat template was applied"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "there is no prompt"),
        (["a", "--top-p", "0"], "top_p"),
        (["a", "--mesh", "1x9"], "mesh 1x9 needs 9 devices and there are 8"),
        (["a", "--mesh", "3x8", "--model", "/no/such/place"], "JAX_NUM_CPU_DEVICES=24"),
        (["a", "--model", "/no/such/place"], "/no/such/place"),
        (["--prompts-file", "/no/such/file"], "/no/such/file"),
        (["a", "--max-model-len", "99999999"], "max_model_len"),
        (
            ["a", "--num-pages", "100000000", "--dtype", "float32"],
            "num_pages 100000000 needs 3,051.8 GiB on each device, and ",
        ),
        (["a", "--num-gpu-blocks-override", "100m", "--mesh", "1x8"], "GiB on each device, and "),
    ],
)
def test_mistakes_cost_one_line_and_exit_code_2(argv, said, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


def test_commands_are_listed_and_unknown_ones_refused(capsys):
    assert jaxvllm(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert jaxvllm(["no-such-command"]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("module", [["jaxvllm", "generate"], ["jaxvllm.generate"]])
def test_help_is_quick_and_needs_no_device(module):
    code = "import sys, runpy; sys.argv = sys.argv[1:]\ntry: runpy.run_module(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit: pass\nassert 'jax' not in sys.modules, 'help imports jax'"
    argv = [sys.executable, "-c", code, *module, "--help"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    assert "--max-num-seqs" in result.stdout


@pytest.mark.parametrize(
    ("mesh", "said"),
    [("0x1", "mesh 0x1 has an empty axis"), ("axb", "mesh 'axb' is not DxM: write replicas x devices of each")],
)
def test_a_mesh_that_is_none_is_told_before_jax_is_imported(mesh, said):
    code = "import sys; from jaxvllm.cli.generate import main; status = main(sys.argv[1:])\n"
    code += "assert 'jax' not in sys.modules, 'too late'\nsys.exit(status)"
    argv = [sys.executable, "-c", code, "a", "--mesh", mesh]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"jaxvllm generate: {said}") and result.stderr.count("\n") == 1
