"""Flags come from the dataclasses, so they can never disagree with them."""

import argparse
from dataclasses import fields

import pytest

from jaxvllm.cli.flags import add_flags, given
from jaxvllm.config import EngineConfig
from jaxvllm.core.sampling_params import SamplingParams


def parser(source: type) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    result.add_argument("prompts", nargs="*")
    add_flags(result, source, "options")
    return result


@pytest.mark.parametrize("source", [EngineConfig, SamplingParams])
def test_every_field_has_a_flag_and_most_say_what_they_are(source):
    actions = {action.dest: action for action in parser(source)._actions}
    assert {field.name for field in fields(source)} <= actions.keys()
    silent = [field.name for field in fields(source) if actions[field.name].help.startswith("(default")]
    assert len(silent) <= len(fields(source)) // 2, silent


def test_nothing_given_leaves_every_default():
    assert given(parser(EngineConfig).parse_args([]), EngineConfig) == {}


def test_values_are_of_the_fields_types():
    argv = ["a", "--mesh", "1x1", "--max-num-seqs", "3", "--no-enable-prefix-caching", "--memory-utilization", "0.5"]
    argv += ["--row-buckets", "1", "--row-buckets", "2", "b"]
    args = parser(EngineConfig).parse_intermixed_args(argv)
    assert args.prompts == ["a", "b"]
    options = given(args, EngineConfig)
    assert options == {
        "mesh": "1x1",
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
        "memory_utilization": 0.5,
        "row_buckets": (1, 2),
    }
    assert EngineConfig.from_options(**options).max_num_seqs == 3


def test_stop_strings_repeat():
    args = parser(SamplingParams).parse_args(["--stop", "a b", "--stop", "c"])
    assert SamplingParams(**given(args, SamplingParams)).stop == ("a b", "c")


@pytest.mark.parametrize("argv", [["--dtype", "int4"], ["--max-num-seqs", "many"], ["--no-such-flag"]])
def test_what_no_field_takes_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as refusal:
        parser(EngineConfig).parse_args(argv)
    assert refusal.value.code == 2
    assert argv[0] in capsys.readouterr().err
