"""What all commands have in common: their names, their help, and what they say about options that do not exist."""

import re
from dataclasses import fields

import pytest

from jaxvllm import __version__
from jaxvllm.cli import COMMANDS, main
from jaxvllm.cli.bench import COMMANDS as BENCHMARKS
from jaxvllm.config import EngineConfig
from jaxvllm.server.config import ServerConfig
from jaxvllm.vllm_options import ADVICE, ALIASES, SHORT_NAMES

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
        (
            ["serve", "demo", "--tensor-parallel-size", "8"],
            [
                "--tensor-parallel-size 8: use --mesh 1x8 "
                "(replicas of the model x devices that each replica is spread over; before them stages, if"
            ],
        ),
        (["generate", "hi", "-tp=4"], ["-tp 4: use --mesh 1x4 (replicas"]),
        (["plan", "--device", "v5e", "-dp", "2"], ["-dp 2: use --mesh 2x1 (replicas"]),
        (["serve", "--pipeline_parallel_size", "2"], ["--pipeline-parallel-size 2: use --mesh 2x1x1 (replicas"]),
        (["serve", "-pp", "2", "-tp", "4"], ["-pp 2 -tp 4: use --mesh 2x1x4 (replicas"]),
        (["serve", "--trust-remote-code", "x"], ["--trust-remote-code: leave it out (nothing in a checkpoint is ever"]),
        (["bench", "serve", "--trust-remote-code"], ["--trust-remote-code: leave it out (nothing in a checkpoint"]),
        (["generate", "hi", "--no-enforce-eager"], ["--no-enforce-eager: leave it out (every step is a compiled"]),
        (["serve", "--enable-chunked-prefill"], ["--enable-chunked-prefill: leave it out (by default long prompts"]),
        (["serve", "--no-enable-chunked-prefill"], ["--no-enable-chunked-prefill: use --scheduler v0 (steps"]),
        (["serve", "--disable-log-stats"], ["--disable-log-stats: use --log-stats-interval inf (only a server"]),
        (["serve", "--enable-log-requests"], ["--enable-log-requests: use --access-log (only a server"]),
        # An option that is switched off has an advice of its own.
        (["serve", "--no-enable-log-requests"], ["--no-enable-log-requests: leave it out (requests are not logged"]),
        (["serve", "--no-disable-log-stats"], ["--no-disable-log-stats: leave it out (a server logs its load"]),
        (["serve", "--no-disable-log-requests"], ["--no-disable-log-requests: use --access-log (only a server"]),
        (["serve", "--no-disable-uvicorn-access-log"], ["--no-disable-uvicorn-access-log: use --access-log;"]),
        # Two options of vLLM that are one here.
        (["serve", "-tp", "2", "-dp=4"], ["-tp 2: use --mesh 1x2 (replicas of the model x"]),
        (["generate", "-tp", "2", "-dp=4"], ["-tp 2 -dp 4: use --mesh 4x2 (replicas of the model x"]),
        (["serve", "--master-addr=a", "--master-port=9"], ["--master-addr a --master-port 9: use --coordinator a:9"]),
        (["serve", "--master-port", "9"], ["--master-port 9: use --coordinator HOST:9 ("]),
        (["serve", "--master-addr", "a"], ["--master-addr a: use --coordinator a:PORT ("]),
        (
            ["serve", "--spec-model", "a/head", "--spec-tokens=2"],
            [
                "--spec-model a/head --spec-tokens 2: use --speculative-config "
                """'{"method": "METHOD", "model": "a/head", "num_speculative_tokens": 2}' (ngram, suffix and mtp need"""
            ],
        ),
        (["serve", "--enable-lora"], ["--enable-lora: leave it out (LoRA adapters are not supported yet)"]),
        (["serve", "--kv-cache-memory-bytes", "9"], ["--kv-cache-memory-bytes: leave it out (memory_utilization or"]),
        (["chat", "hi", "-tp", "2"], ["unknown option -tp; see"]),
        (["bench", "serve", "--num-warmups", "3"], ["unknown option --num-warmups; see"]),
        (["generate", "hi", "--disable-log-stats"], ["unknown option --disable-log-stats"]),
        (["serve", "--uvicorn-log-level", "info"], ["--uvicorn-log-level: leave it out (only errors"]),
        (["serve", "--root-path=/x"], ["--root-path: leave it out (let the proxy"]),
        (["serve", "-q", "awq"], ["-q: leave it out (quantized checkpoints"]),
        # Where there is no engine, the options of one are unknown as all others are.
        (["chat", "hi", "--tensor-parallel-size", "8"], ["unknown option --tensor-parallel-size"]),
        (["run-batch", "-iin", "--output-files", "x"], ["unknown option --output-files: did you mean --output-file?"]),
        (["serve", "--max-num-sequences", "8"], ["unknown option --max-num-sequences: did you mean --max-num-seqs?"]),
        (["convert", "--nonsense"], ["unknown option --nonsense"]),
        # All at once: a user who brings a command line of vLLM's mends it in one go.
        (["serve", "-tp", "8", "--enforce-eager", "--xyz"], ["-tp 8: use", "--enforce-eager: leave", "unknown option"]),
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
    # A value that begins so, a text with a space, and what stands behind --.
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
    names = "serve, sweep, latency, throughput, ladder, startup, steps, auto-tune or kernels"
    assert err == f"jaxvllm bench: give {names} first: {command}; see jaxvllm bench --help\n"


def test_help_is_plain_where_it_was_a_riddle(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "auto: that of --dtype" in out
    assert "share of a device's memory (on CPU: of the free memory)" in out
    assert "VLLM_SERVER_DEV_MODE" not in out, "nothing here reads it"


def test_a_wrong_value_is_one_line(capsys):
    code, err = told(["serve", "--max-model-len", "4q"], capsys)
    assert code == 2
    assert err.startswith(
        "jaxvllm serve: argument --max-model-len: give a whole number such as 4096, 4k or 4K, not '4q'"
    )
    assert err.count("\n") == 1


def test_the_table_of_vllms_options_is_of_options_that_exist_here_and_names_that_do_not():
    ours = {field.name for source in (EngineConfig, ServerConfig) for field in fields(source)}
    assert set(ALIASES.values()) | {one.field for one in ADVICE.values() if one.field} <= ours
    assert not ours & (ALIASES.keys() | ADVICE.keys()), "an option of ours needs no advice"
    assert not ALIASES.keys() & ADVICE.keys()
    assert set(SHORT_NAMES.values()) <= ADVICE.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 8},
            "unknown option 'tensor_parallel_size' (did you mean 'mesh'?): use mesh='1x8' "
            "(replicas of the model x devices that each replica is spread over; before them stages, if",
        ),
        (
            {"gpu_memory_utilization": 0.5},
            "unknown option 'gpu_memory_utilization' (did you mean 'memory_utilization'?): use memory_utilization=0.5",
        ),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 4},
            "unknown option 'tensor_parallel_size' (did you mean 'mesh'?): use mesh='4x2'",
        ),
        (
            {"enable_chunked_prefill": False},
            "unknown option 'enable_chunked_prefill' (did you mean 'scheduler'?): use scheduler='v0' (steps then hold",
        ),
        ({"enable_chunked_prefill": True}, "unknown option 'enable_chunked_prefill': leave it out (by default"),
        ({"disable_log_stats": False}, "unknown option 'disable_log_stats': leave it out (a server logs its load"),
        ({"disable_log_requests": False}, "unknown option 'disable_log_requests': leave it out (only a server logs"),
        ({"enforce_eager": False}, "unknown option 'enforce_eager': leave it out (every step is"),
        ({"trust_remote_code": True}, "unknown option 'trust_remote_code': leave it out (nothing in a checkpoint is"),
        ({"disable_log_stats": True}, "unknown option 'disable_log_stats': leave it out (only a server logs its load"),
    ],
)
def test_python_gets_the_same_advice(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        EngineConfig.from_options(**options)
