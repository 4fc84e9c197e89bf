"""The comparison with peers on a CPU: who takes part, what they read, what counts, and the picture. No peer runs."""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import peer_engines
from benchmarks.cpu import WAKING, measure, result
from benchmarks.cpu_picture import bound_of, draw, figure_of, panels
from benchmarks.peer_engines import INSTALLATIONS, Run, chosen_installations
from benchmarks.peer_files import PeerFiles
from benchmarks.qwen3 import qwen3, qwen3_moe
from benchmarks.roofline import Roofline
from benchmarks.workload import Workload
from jaxvllm.cli import main
from tests.commands import exit_code_of

SHORT = Workload.uniform(2, 3, 4)
PROMPT = Workload.prompt(5)


class Counting:
    """An engine that counts up from its first token, and notes who ran when."""

    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}

    def __init__(self, name: str, log: list[tuple[str, int]], first: int = 0) -> None:
        self.name, self._log, self._first = name, log, first

    def takes(self, load: Workload) -> bool:
        return True

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run:
        self._log.append((self.name, prompts[0][0]))
        return Run(2.0, 0.5, [list(range(self._first, self._first + count)) for count in output_tokens])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cpu.PAUSE_SECONDS", 0.0)


def test_rounds_turn_the_order_round_and_bring_new_prompts() -> None:
    log: list[tuple[str, int]] = []
    runs = measure([Counting("a", log), Counting("b", log)], SHORT, rounds=2)
    first = [SHORT.prompts(round_)[0][0] for round_ in range(3)]
    assert len(set(first)) == 3
    waking = [WAKING.prompts(round_)[0][0] for round_ in range(3)]
    order = [(name, at) for at, names in enumerate(("ba", "ab", "ba")) for name in names]
    assert log == [(name, ids[at]) for name, at in order for ids in (waking, first)]
    assert [len(series) for series in runs.values()] == [2, 2]


def test_an_engine_that_answers_too_little_ends_the_run() -> None:
    class Short(Counting):
        def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run:
            return super().run(prompts, (3, 4))

    with pytest.raises(RuntimeError, match=r"b gave \[3, 4\] tokens, not \(4, 4\)"):
        measure([Counting("a", []), Short("b", [])], SHORT, rounds=1)


def test_no_two_workloads_share_a_prompt() -> None:
    loads = (Workload.uniform(1, 8, 4), Workload.prompt(8), Workload.prompt(16))
    begins = {tuple(load.prompts(1)[0][:8]) for load in loads}
    assert len(begins) == 2, "the two of one length differ in what they answer alone"
    assert SHORT.longest == 7 and PROMPT.is_prompt and not SHORT.is_prompt


def test_first_tokens_that_agree_are_counted_for_each_request() -> None:
    ours, other = Run(1.0, 1.0, [[1, 2, 3], [4, 5, 6]]), Run(1.0, 1.0, [[1, 2, 3], [4, 9, 6]])
    assert other.agreeing(ours) == [3, 1]
    record = result(Workload.uniform(2, 3, 3), "b", [other], [ours])
    assert record["first_tokens_that_agree"] == {"median": 2, "least": 1}
    assert record["tokens_per_second"] == [6.0]


def test_peers_that_are_not_installed_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_engines, "ROOT", tmp_path)
    for folder in (".vllm", ".llamacpp"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".stamp").touch()
    chosen, left_out = chosen_installations(None, "plain")
    assert [one.name for one in chosen] == ["llama.cpp", "vLLM"]
    assert left_out[0] == "without OpenVINO: OpenVINO is not installed: make .openvino/.stamp"
    chosen, left_out = chosen_installations(None, "int4")
    assert [name for one in chosen for name in one.engine_names("int4")] == [
        ("llama.cpp Q4_0", "Q4_0"),
        ("llama.cpp Q4_K_M", "Q4_K_M"),
    ]
    with pytest.raises(ValueError, match="make .openvino/.stamp"):
        chosen_installations(["OpenVINO"], "plain")
    with pytest.raises(ValueError, match="vLLM makes no int8 weights"):
        chosen_installations(["vLLM"], "int8")


def test_the_command_refuses_a_peer_that_takes_no_such_weights(capsys: pytest.CaptureFixture[str]) -> None:
    names = " ".join(one.name for one in INSTALLATIONS)
    assert names == "OpenVINO llama.cpp vLLM transformers"
    # It would start itself again with these, in the place of this process.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENBLAS_NUM_THREADS", "2")
        environment.setenv("OMP_NUM_THREADS", "2")
        assert exit_code_of(main, ["bench", "peers", "--weights", "int8", "--peers", "vLLM"]) == 2
    assert "vLLM makes no int8 weights" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config", [qwen3(2, 64, 96, 2, 1, 32, 700), qwen3_moe(2, 64, 32, 3, 2, 2, 1, 32, 700)], ids=["dense", "experts"]
)
def test_a_gguf_file_has_the_numbers_of_the_checkpoint(dtype: str, config: dict[str, Any], tmp_path: Path) -> None:
    files = PeerFiles(tmp_path, config | {"torch_dtype": dtype})
    tensors = load_file(files.path("checkpoint") / "model.safetensors")
    read = {str(one.name): one for one in gguf.GGUFReader(files.path("gguf")).tensors}

    def of_file(name: str) -> np.ndarray:
        data = read[f"{name}.weight"].data
        return data if data.dtype == np.float32 else data.view(ml_dtypes.bfloat16)

    last = "model.layers.1"
    same = {
        "output": "lm_head",
        "blk.1.attn_q": f"{last}.self_attn.q_proj",
        "blk.1.ffn_norm": f"{last}.post_attention_layernorm",
    }
    for name, source in same.items():
        np.testing.assert_array_equal(of_file(name).astype(np.float32), tensors[f"{source}.weight"].astype(np.float32))
    experts = config.get("num_experts", 0)
    for part in ("gate", "up", "down"):
        if experts:
            expected = np.stack([tensors[f"{last}.mlp.experts.{at}.{part}_proj.weight"] for at in range(experts)])
            np.testing.assert_array_equal(of_file(f"blk.1.ffn_{part}_exps"), expected)
        else:
            np.testing.assert_array_equal(of_file(f"blk.1.ffn_{part}"), tensors[f"{last}.mlp.{part}_proj.weight"])
    in_experts = 3 * 2 * experts
    assert len(read) == len(tensors) - in_experts + (6 if experts else 0)


def test_the_roofline_counts_weights_and_keys() -> None:
    config = qwen3(2, 64, 96, 2, 1, 32, 700)
    layers, head, kv = 2 * 64 * (6 * 32 + 3 * 96), 64 * 700, 2 * 2 * 32
    for read, step in (
        (1e7, (0.5 * (layers + head) + 4 * 2 * 5 * kv) / 1e7),  # bound by memory
        (1e9, 2 * 2 * (layers + head) / 1e9),  # by arithmetic
    ):
        bound = Roofline(read, copy=1e9, flops=1e9).bound(config, SHORT, weight_bytes=0.5, kv_bytes=4)
        first = 2 * 2 * (layers * 3 + head) / 1e9
        assert bound.first_token_seconds == pytest.approx(first)
        assert bound.tokens_per_second == pytest.approx(8 / (first + 3 * step))


def test_a_picture_is_drawn_from_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record: dict[str, Any] = {
        "model_name": "S",
        "dtype": "float32",
        "weights": "plain",
        "threads": 2,
        "device": {"cpu": "a CPU"},
        "roofline": {"read": 1.0, SHORT.name: {"first_token_seconds": 0.25, "tokens_per_second": 9.0}},
        "results": [
            result(load, name, [run], [run])
            for load in (SHORT, PROMPT)
            for name in ("jaxvllm", "llama.cpp Q4_0")
            for run in [Counting(name, []).run(load.prompts(1), load.output_tokens)]
        ],
    }
    record = json.loads(json.dumps(record))
    found = panels(record)
    assert [(name, [one["engine"] for one in results]) for name, results in found.items()] == [
        (load.name, ["jaxvllm", "llama.cpp Q4_0"]) for load in (SHORT, PROMPT)
    ]
    assert [figure_of(results[0]) for results in found.values()] == ["tokens_per_second", "first_token_ms"]
    assert bound_of(record, SHORT.name, "tokens_per_second") == 9.0
    assert bound_of(record, SHORT.name, "first_token_ms") == 250.0
    assert bound_of(record, PROMPT.name, "first_token_ms") is None
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    draw([path, path], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
