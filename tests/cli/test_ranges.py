"""Every number of a command is in the range that its flag declares, or is refused before anything is computed."""

import argparse
import math
from collections.abc import Iterator
from importlib import import_module

import pytest

from jaxvllm.bench.traffic import Traffic
from jaxvllm.cli import main, plan, simulate
from jaxvllm.cli.bench import COMMANDS
from jaxvllm.cli.flags import whole_number
from jaxvllm.cli.parser import Parser
from jaxvllm.core.sampling_params import SamplingParams
from tests.commands import exit_code_of

NUMBERS = ("-1", "0", "nan", "inf", "-inf", "1e-300", "1e300", "1" + 30 * "0", "1" + 400 * "0", "9" * 5000)
SIMULATE = "simulate demo --device h100 --num-prompts 20 --random-input-len 8 --random-output-len 4".split()
# `bench serve` checks these as a request of a server does, and the port as a part of the server's address.
CHECKED_ELSEWHERE = {*SamplingParams.__dataclass_fields__, "port"}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield "simulate", simulate._parser()
    yield "plan", plan._parser()
    for command in COMMANDS:
        parser = Parser(prog=command)
        import_module(f"jaxvllm.cli.bench.{command.replace('-', '_')}").add_flags(parser)
        yield command, parser


def test_every_number_has_a_range() -> None:
    count = 0
    for command, parser in parsers():
        for action in parser._actions:
            name = f"{command} {action.option_strings}"
            assert action.type not in (int, float, whole_number) or action.dest in CHECKED_ELSEWHERE, name
            if action.metavar not in ("N", "NUMBER") or action.dest in CHECKED_ELSEWHERE:
                continue
            count += 1
            assert callable(action.type), name
            for text in NUMBERS:
                try:
                    value = action.type(text)
                except argparse.ArgumentTypeError as error:
                    assert "must be" in str(error) or "give a" in str(error), name
                else:
                    assert -1 <= value and (isinstance(value, float) or value < 2**63), name
    assert count > 100


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--burstiness 1e-300", "--burstiness: must be a number from 0.05 to 1e+06, not 1e-300"),
        ("--host-ms -5", "--host-ms: must be a number from 0 to 1e+06, not -5"),
        ("--load conversations --turn-seconds nan", "--turn-seconds: must be a number from 0 to 1e+06, not nan"),
        ("--kv-latency-ms nan", "--kv-latency-ms: must be a number from 0 to 1e+06, not nan"),
        ("--pools 99999999+1", "num_replicas must be an integer from 1 to 1024, not 99999999"),
        ("--mesh 999999999x1", "num_replicas must be an integer from 1 to 1024, not 999999999"),
        ("--max-num-seqs 1" + 30 * "0", "--max-num-seqs: must be an integer from 1 to 1048576, not 1000000"),
        ("--num-prompts 1" + 5000 * "0", "--num-prompts: give a whole number such as 4096, 4k or 4K"),
    ],
)
def test_a_number_out_of_range_is_one_line(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of these was computed with before: for ever, or until a traceback."""
    assert exit_code_of(main, [*SIMULATE, *words.split()]) == 2
    captured = capsys.readouterr()
    assert error in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("words", ["--burstiness 0.05", "--request-rate 1e300", "--request-rate 1e-6", "--host-ms 1e6"])
def test_the_ends_of_a_range_are_simulated(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, *words.split()]) == 0
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, math.nan, 1e-300, math.inf])
def test_a_dataclass_checks_what_its_flags_check(number: float) -> None:
    with pytest.raises(ValueError, match="--burstiness must be a number from 0.05 to 1e"):
        Traffic(burstiness=number)
