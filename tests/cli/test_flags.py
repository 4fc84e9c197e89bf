"""Flags come from the dataclasses, so they can never disagree with them."""

import argparse
from dataclasses import fields

import pytest

from jaxvllm.cli import serve
from jaxvllm.cli.flags import add_client_sampling_flags, add_flags, given
from jaxvllm.config import EngineConfig
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.server.config import ServerConfig


def parser(source: type, **options: bool) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    result.add_argument("prompts", nargs="*")
    add_flags(result, source, "options", **options)
    return result


@pytest.mark.parametrize("source", [EngineConfig, SamplingParams])
def test_every_field_has_a_flag_and_most_say_what_they_are(source):
    actions = {action.dest: action for action in parser(source)._actions}
    # Nobody types these at a terminal.
    objects = {"logit_bias", "structured_outputs", "repetition_detection", "extra_args"}
    names = {field.name for field in fields(source)} - objects
    assert names == actions.keys() - {"help", "prompts"}
    silent = [name for name in names if actions[name].help.startswith("(default")]
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


PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}


def test_clients_have_a_flag_for_what_draws_tokens_and_tell_no_default():
    result = argparse.ArgumentParser(add_help=False)
    add_client_sampling_flags(result, skip=("stop",))
    helps = {action.dest: action.help for action in result._actions}
    assert set(helps) == {"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"} | PENALTIES
    assert all(text and "default" not in text for text in helps.values()), "the server has its own"
    args = result.parse_args(["--top-k", "3", "--seed", "5"])
    assert given(args, SamplingParams, skip=("seed",)) == {"top_k": 3}


def test_options_have_the_names_of_vllm_where_they_mean_the_same():
    argv = ["--gpu-memory-utilization", "0.5", "--block-size", "32", "--num-gpu-blocks-override", "9"]
    options = given(parser(EngineConfig).parse_args(argv), EngineConfig)
    assert options == {"memory_utilization": 0.5, "page_size": 32, "num_pages": 9}


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("1m", 10**6), ("2M", 2 * 2**20), ("-1", -1)],
)
def test_whole_numbers_may_have_a_unit(text, number):
    assert given(parser(EngineConfig).parse_args([f"--max-logprobs={text}"]), EngineConfig) == {"max_logprobs": number}


@pytest.mark.parametrize("text", ["4.5", "k", "4kk", "1.0001k", "", "4 k"])
def test_what_is_no_whole_number_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        parser(EngineConfig).parse_args(["--max-model-len", text])
    assert f"give a whole number such as 4096, 4k or 4K, not {text!r}" in capsys.readouterr().err


def test_several_values_may_follow_a_servers_flag():
    argv = ["model", "--served-model-name", "a", "b", "--api-key", "c", "--api-key", "d", "e"]
    args = parser(ServerConfig, takes_lists=True).parse_args(argv)
    assert args.prompts == ["model"]
    assert given(args, ServerConfig) == {"served_model_name": ("a", "b"), "api_key": ("c", "d", "e")}


@pytest.mark.parametrize("argv", [["--api-key", "secret", "path/to/model"], ["--served-model-name", "a", "b"]])
def test_a_model_is_not_taken_for_one_more_value(argv, capsys):
    assert serve.main(argv) == 2
    message = f"several values follow {argv[0]} and no model is given: write the model before the flags"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--dtype", "int4"], ["--max-num-seqs", "many"], ["--no-such-flag"]])
def test_what_no_field_takes_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as refusal:
        parser(EngineConfig).parse_args(argv)
    assert refusal.value.code == 2
    assert argv[0] in capsys.readouterr().err
