"""What all commands have in common: their names, their help, and what they say about options that do not exist."""

import re

import pytest

from jaxvllm import __version__
from jaxvllm.cli import COMMANDS, main
from jaxvllm.cli.bench import COMMANDS as BENCHMARKS

EVERY_COMMAND = [*([name] for name in COMMANDS), *(["bench", name] for name in BENCHMARKS)]
# How a Python programmer would write a default, and nobody at a terminal.
REPRS = re.compile(
    r"\bNone\b|\(\)|\bTrue\b|\bFalse\b|(?<![\d.])\d+\.0(?![\d.])|\bSTR\b|\bINT\b|\bFLOAT\b|PosixPath|<class"
)


def told(argv, capsys):
    """The exit code, and what a command said on standard error."""
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    assert not captured.out
    return code, captured.err


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_the_version(flag, capsys):
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"jaxvllm {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_has_a_sentence_for_each_command(flag, capsys):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", out, re.MULTILINE), name


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (["foo"], "jaxvllm: unknown command foo"),
        (["srve"], "jaxvllm: unknown command srve: did you mean serve?"),
        (["batch"], "jaxvllm: unknown command batch: did you mean run-batch?"),
        (["--verbose"], "jaxvllm: unknown option --verbose"),
        ([], "jaxvllm: give a command"),
    ],
)
def test_an_unknown_command_is_named_before_those_there_are(argv, first, capsys):
    code, err = told(argv, capsys)
    assert code == 2
    assert err.splitlines()[0] == first
    assert all(name in err for name in COMMANDS)


@pytest.mark.parametrize("argv", EVERY_COMMAND, ids=" ".join)
def test_help_shows_defaults_as_a_user_would_type_them(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main([*argv, "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and out.startswith(f"usage: jaxvllm {' '.join(argv)}")
    assert not REPRS.findall(out)


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["serve", "--no-enable-chunked-prefill"], ["--no-enable-chunked-prefill: use --scheduler v0 (steps"]),
        (["serve", "--master-port", "9"], ["--master-port 9: use --coordinator HOST:9 ("]),
        (["serve", "--master-addr", "a"], ["--master-addr a: use --coordinator a:PORT ("]),
        (
            ["serve", "--spec-model", "a/head", "--spec-tokens=2"],
            [
                "--spec-model a/head --spec-tokens 2: use --speculative-config "
                """'{"method": "METHOD", "model": "a/head", "num_speculative_tokens": 2}' (ngram, suffix and mtp need"""
            ],
        ),
        (["serve", "--lora-dtype", "float32"], ["--lora-dtype: leave it out (adapters have the dtype of the model)"]),
        (["generate", "hi", "--enable-lora"], ["unknown option --enable-lora"]),
        (["serve", "--kv-cache-memory-bytes", "9"], ["--kv-cache-memory-bytes: leave it out (memory_utilization or"]),
        (["serve", "-q", "experts_int8"], ["-q experts_int8: use --quantization NAME (NAME is int8, fp8, int4,"]),
        (["serve", "--hf-token", "a secret"], ["--hf-token: leave it out ("]),
        (["serve", "--kv-offloading-size=8"], ["--kv-offloading-size: use --kv-transfer-config '{\"kv_connector"]),
        (["serve", "-sc.method=x", "--structured-outputs-config.enable_in_reasoning=true"],
         ["--structured-outputs-config.enable_in_reasoning: leave it out (the form of an answer"]),
        (["serve", "--structured-outputs-config", "[]"], ["structured_outputs_config must be a JSON object, not []"]),
        (["serve", "-tp", "2", "--mesh", "1x4"], ["-tp 2: --mesh says the same: give one of them"]),
        (["serve", "--config"], ["--config needs a YAML file with options"]),
        (["serve", "--config", "/nowhere"], ["--config /nowhere cannot be read"]),
        (["chat", "hi", "-tp", "2"], ["unknown option -tp; see"]),
        (["bench", "serve", "--num-warmups", "3"], ["unknown option --num-warmups; see"]),
        (["generate", "hi", "--disable-log-stats"], ["unknown option --disable-log-stats"]),
        # Where there is no engine, the options of one are unknown as all others are.
        (["chat", "hi", "--tensor-parallel-size", "8"], ["unknown option --tensor-parallel-size"]),
        (["run-batch", "-iin", "--output-files", "x"], ["unknown option --output-files: did you mean --output-file?"]),
        (["serve", "--max-num-sequences", "8"], ["unknown option --max-num-sequences: did you mean --max-num-seqs?"]),
        (["convert", "--nonsense"], ["unknown option --nonsense"]),
        # All at once: a user who brings a command line of vLLM's mends it in one go.
        (
            ["serve", "-tp", "8", "--lora-dtype", "float32", "--enforce-eager", "--xyz", "--runner", "draft"],
            ["--lora-dtype: leave", "--runner: leave", "unknown option --xyz"],
        ),
    ],
)  # fmt: skip
def test_options_that_do_not_exist_are_told_what_to_give_instead(argv, lines, capsys):
    code, err = told(argv, capsys)
    command = " ".join(argv[: 2 if argv[0] == "bench" else 1])
    assert code == 2
    assert err.endswith(f"; see jaxvllm {command} --help\n")
    for said, line in zip(err.splitlines(), lines, strict=True):
        assert said.startswith(f"jaxvllm {command}: {line}")


@pytest.mark.parametrize("words", [["-dp", "2"], ["-dp=2"], ["--data_parallel_size", "2"]])
def test_replicas_have_the_short_name_of_vllm(words, capsys):
    assert main(["serve", *words, "--mesh", "3x1"]) == 2
    assert "data_parallel_size is 2, and mesh 3x1 has 3 replicas: give one of them" in capsys.readouterr().err


def test_what_only_looks_like_an_option_is_none(capsys):
    # A value that begins so, a text with a space, and what stands after --.
    code, err = told(["chat", "--base-url", "nowhere", "- a list", "--stop=--no-such"], capsys)
    assert (code, "the base URL must be" in err) == (2, True)
    code, err = told(["complete", "--base-url", "nowhere", "--", "--no-such"], capsys)
    assert (code, "the base URL must be" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["--num-prompts", "3"], "jaxvllm bench serve --num-prompts 3"),
        (["--num-prompts", "3", "sweep"], "jaxvllm bench sweep --num-prompts 3"),
    ],
)
def test_bench_without_its_command_says_where_the_command_stands(argv, command, capsys):
    code, err = told(["bench", *argv], capsys)
    assert code == 2
    names = "serve, sweep, latency, throughput, ladder, startup, steps, auto-tune, peers or kernels"
    assert err == f"jaxvllm bench: give {names} first: {command}; see jaxvllm bench --help\n"


def test_help_is_plain_where_it_was_a_riddle(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "auto: that of --dtype" in out
    assert "share of a device's memory (on CPU: of the free memory)" in out
    assert "VLLM_SERVER_DEV_MODE" not in out, "nothing here reads it"
    assert "--mesh TEXT Replicas of the model x devices that each replica is spread over" in out, "a comment above it"
    assert 'as JSON: {"method": "ngram", "num_speculative_tokens": 3} (default: the tokens that' in out


def test_a_wrong_value_is_one_line(capsys):
    code, err = told(["serve", "--max-model-len", "4q"], capsys)
    assert code == 2
    assert err.startswith(
        "jaxvllm serve: argument --max-model-len: give a whole number such as 4096, 4k or 4K, not '4q'"
    )
    assert err.count("\n") == 1
