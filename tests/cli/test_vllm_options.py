"""Command lines that people bring from vLLM, and keyword arguments of vLLM's `LLM`."""

import math
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from jaxvllm.cli import main, serve
from jaxvllm.config import EngineConfig, Quantization
from jaxvllm.core.speculative_config import SpeculativeConfig
from jaxvllm.server.config import ServerConfig
from jaxvllm.vllm_options import ALIASES, OPTIONS, SHORT_NAMES, Refused, Translated
from jaxvllm.worker.data_parallel_config import DataParallelConfig

QUANTIZATIONS = ", ".join(name for name in get_args(Quantization) if name != "fp8_w8a8")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--tensor-parallel-size", "8"], {"mesh": "1x8"}),
        (["-tp=4"], {"mesh": "1x4"}),
        (["--pipeline_parallel_size", "2"], {"mesh": "2x1x1"}),
        (["-pp", "2", "-tp", "4"], {"mesh": "2x1x4"}),
        (["-tp", "2", "-dp=4"], {"mesh": "1x2", "data_parallel_size": 4}),
        (["--disable-log-stats"], {"log_stats_interval": math.inf}),
        (["--enable-log-requests"], {"access_log": True}),
        (["--no-disable-log-requests"], {"access_log": True}),
        (["--no-disable-uvicorn-access-log"], {"access_log": True}),
        (["--master-addr=a", "--master-port=9"], {"coordinator": "a:9"}),
        (["--nnodes", "2", "--node-rank", "0"], {"num_processes": 2, "process_id": 0}),
        (["--num-scheduler-steps", "8"], {"max_decode_burst": 8}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--all2all-backend", "pplx"], {"all2all_backend": "allgather_reducescatter"}),
        (["--all2all-backend=deepep_high_throughput"], {"all2all_backend": "ragged_all_to_all"}),
        (["--dtype=float"], {"dtype": "float32"}),
        (["--max-model-len", "auto", "--max-num-queued-reqs", "3"], {"max_num_queued_requests": 3}),
        (["--disable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no-disable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--structured-outputs-config", '{"reasoning_parser": "qwen3"}'], {"reasoning_parser": "qwen3"}),
        (["--structured_outputs_config.reasoning_parser", "qwen3"], {"reasoning_parser": "qwen3"}),
        (["-asc", "2", "-dpl", "1"], {"api_server_count": 2, "data_parallel_size_local": 1}),
        (["-dpp=29"], {"data_parallel_rpc_port": 29}),
        (["--served-model-name", "a", "b", "org/model"], {"model": "org/model", "served_model_name": ("a", "b")}),
        (["--served-model-name", "a", "--port", "1", "org/model"], {"model": "org/model", "port": 1}),
    ],
)
def test_options_of_vllm_become_ours(words, options):
    made = {name: value for config in serve.read_options(words) for name, value in vars(config).items()}
    assert {name: made[name] for name in options} == options


def test_members_of_a_json_option_may_stand_alone():
    words = ["-sc.method=ngram", "--speculative-config.prompt_lookup_max", "4", "--speculative_config.model=null"]
    [engine, _, _] = serve.read_options(words)
    assert engine.drafting == SpeculativeConfig(method="ngram", prompt_lookup_min=4, prompt_lookup_max=4)


def test_one_line_names_all_options_that_change_nothing(capsys):
    words = shlex.split(
        "--trust-remote-code --no-enforce-eager --swap-space 4 --attention-backend FLASH_ATTN -O3 -cc.mode=0 "
        "--cudagraph-capture-sizes 1 2 --load-format=safetensors --tokenizer-mode auto --no-enable-moe-shared-loras "
        "--enable-chunked-prefill --disable-log-requests --uvicorn-log-level=info --distributed-executor-backend ray "
        "--disable-flashinfer-autotune --cpu-offload-gb=0 --quantization awq"
    )
    [engine, server, _] = serve.read_options(["org/model", *words])
    assert (engine, server) == (EngineConfig(model="org/model"), ServerConfig())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxvllm serve: these options of vLLM change nothing here: ")
    flags = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
    assert all(flag in line for flag in flags), line
    assert "--optimization-level" in line and "--compilation-config" in line


def command_lines():
    """Returns the command lines of vLLM's docs, each with the flags of it that are refused."""
    text = Path(__file__).with_name("vllm_command_lines.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    starts = [index for index, line in enumerate(lines) if not line.startswith("!")]
    ends = [*starts[1:], len(lines)]
    refused = [[line[2:] for line in lines[start + 1 : end]] for start, end in zip(starts, ends, strict=True)]
    return list(zip([lines[start] for start in starts], refused, strict=True))


def test_there_are_a_hundred_command_lines():
    assert len(command_lines()) == 100


@pytest.mark.parametrize(("line", "refused"), command_lines())
def test_command_lines_of_vllm_start_or_name_all_that_cannot_be(line, refused, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: org/model\nport: 8000\ntensor-parallel-size: 2\n")
    monkeypatch.setenv("JAXVLLM_KV_SECRET", "0123456789abcdef" * 2)
    try:
        serve.read_options(shlex.split(line))
    except (ValueError, NotImplementedError) as error:
        told = capsys.readouterr().err if "see above" in str(error) else str(error)
        sentences = [sentence.removeprefix("jaxvllm serve: ") for sentence in told.splitlines()]
        sentences = [one for one in sentences if not one.startswith("these options of vLLM change nothing")]
        assert len(sentences) == len(refused), told
        assert all(flag in sentence for flag, sentence in zip(refused, sentences, strict=True)), told
    else:
        assert not refused


def test_a_file_has_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: org/file\nport: 9\nserved-model-name: [a, b]\ntensor_parallel_size: 2\nenforce-eager: true\n"
        "enable_prefix_caching: false\nseed: null\nspeculative-config:\n  method: ngram\n  num_speculative_tokens: 2\n"
    )
    [engine, server, _] = serve.read_options(["--config", str(file), "--port", "10"])
    assert (engine.model, engine.mesh, engine.enable_prefix_caching, engine.seed) == ("org/file", "1x2", False, 0)
    assert engine.drafting == SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    assert (server.port, server.served_model_name) == (10, ("a", "b"))
    [engine, server, _] = serve.read_options(["org/line", f"--config={file}", "--served-model-name", "c", "-tp", "4"])
    assert (engine.model, engine.mesh, server.served_model_name) == ("org/line", "1x4", ("c",))


@pytest.mark.parametrize("text", ["- port", "port: [", "7: 8", ""])
def test_a_file_that_has_no_options_is_refused(text, tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(file)])
    err = capsys.readouterr().err
    assert err.startswith(f"jaxvllm serve: --config {file} ") and err.count("\n") == 1


def test_everything_wrong_is_reported_at_once(capsys):
    assert main(["serve", "--reasoning-parser", "none", "--tool-call-parser", "none", "--headless"]) == 2
    lines = capsys.readouterr().err.splitlines()
    wrong = ["reasoning_parser", "tool_call_parser", "a headless host needs"]
    assert [line.startswith(f"jaxvllm serve: {one}") for line, one in zip(lines, wrong, strict=True)] == [True] * 3


def test_the_table_of_vllms_options_is_of_options_that_exist_here_and_names_that_do_not():
    sources = (EngineConfig, ServerConfig, DataParallelConfig)
    ours = {field.name for source in sources for field in fields(source)}
    named = {one.field for one in OPTIONS.values() if isinstance(one, Translated | Refused) and one.field}
    assert set(ALIASES.values()) | named <= ours
    # Only `jaxvllm serve` has the option -dp.
    assert ours & (ALIASES.keys() | OPTIONS.keys()) == {"data_parallel_size"}
    assert not ALIASES.keys() & OPTIONS.keys()
    assert set(SHORT_NAMES.values()) <= OPTIONS.keys() | ours


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"tensor_parallel_size": 8}, {"mesh": "1x8"}),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, {"mesh": "4x2"}),
        ({"gpu_memory_utilization": 0.5, "block_size": 32}, {"memory_utilization": 0.5, "page_size": 32}),
        ({"trust_remote_code": True, "enforce_eager": False, "enable_chunked_prefill": True, "swap_space": 4}, {}),
        ({"quantization": None, "enable_lora": False, "dtype": "half", "max_model_len": -1}, {"dtype": "float16"}),
        ({"quantization": "int8_per_channel_weight_only"}, {"quantization": "int8"}),
        ({"quantization": "fp8_per_tensor"}, {"quantization": "fp8"}),
        ({"quantization": "int4_g32"}, {"quantization": "int4_g32"}),
        ({"quantization": "gptq_marlin"}, {}),
        ({"compilation_config": {"level": 3}, "limit_mm_per_prompt": {"image": 0}}, {}),
        ({"structured_outputs_config": {"backend": "auto", "enable_in_reasoning": False}}, {}),
    ],
)
def test_python_takes_the_same_options(options, ours):
    assert EngineConfig.from_options(**options) == EngineConfig(**ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill: use scheduler='v0' (steps then hold"),
        ({"lora_dtype": "int8", "xyz": 1}, "lora_dtype: leave it out (adapters have the dtype of the model); unknown"),
        ({"quantization": "q4"}, f"quantization q4: use quantization='NAME' (NAME is {QUANTIZATIONS} or fp8_w8a8"),
        ({"max_num_sequences": 1}, "unknown option 'max_num_sequences': did you mean 'max_num_seqs'?"),
        # Only a server logs its load.
        ({"disable_log_stats": True}, "unknown option 'disable_log_stats'"),
    ],
)
def test_python_gets_the_same_advice(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        EngineConfig.from_options(**options)


def test_a_node_that_follows_has_the_mesh_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[EngineConfig] = []
    monkeypatch.setattr("jaxvllm.engine.multihost.follow_config", followed.append)
    words = "-tp 8 -dp 2 --enable-expert-parallel --nnodes 2 --node-rank 1 --master-addr a --master-port 9"
    assert serve.main(words.split()) == 0
    [config] = followed
    assert config.mesh == "2x8" and config.shares_experts
