"""Two processes of two devices each run one engine; none hangs when the other ends or was told something else."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import ml_dtypes  # noqa: F401  # NumPy has no bfloat16 without it
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm import LLM
from tests.models.adapters import RandomAdapter
from tests.models.fixture import Fixture
from tests.quick import quick_engines
from tests.runtime.multihost import hosts_program
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
# jax's own heartbeats notice it after so long.
HEARTBEAT_SECONDS = 100


@dataclass
class Processes:
    """Two processes that run one scenario of `hosts_program.py`."""

    processes: list[subprocess.Popen[str]]

    def wait(self) -> list[tuple[int, str, str]]:
        """Exit code, standard output and standard error of both."""
        # Both at once: a process whose pipe nobody reads stands still when that is full.
        with ThreadPoolExecutor(len(self.processes)) as threads:
            outputs = list(threads.map(partial(subprocess.Popen.communicate, timeout=PATIENCE), self.processes))
        return [(process.returncode, *output) for process, output in zip(self.processes, outputs, strict=True)]


@contextmanager
def two_processes(scenario: str, *arguments: str) -> Iterator[Processes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    program = [sys.executable, "-m", "tests.runtime.multihost.hosts_program", scenario]
    processes = [
        subprocess.Popen(
            [*program, str(index), coordinator, *arguments],
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    try:
        yield Processes(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@cache
def alone() -> list[list[list[int]]]:
    """What one process completes, on one device."""
    with quick_engines(), LLM(**hosts_program.options("1x1")) as llm:
        return hosts_program.complete(llm)


# The leader is the victim where each process has all layers, and the follower where each has a stage.
@pytest.mark.slow  # two processes start jax and compile
@pytest.mark.parametrize(("scenario", "victim"), [("complete", 0), ("complete in stages", 1)])
def test_two_processes_complete_as_one_and_when_one_is_killed_the_other_ends(
    scenario: str, victim: int, tmp_path: Path
) -> None:
    tensors = load_file(hosts_program.DEMO / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]  # the least likely tokens are the most likely
    save_file(tensors, tmp_path / "model.safetensors")
    with two_processes(scenario, "demo", str(tmp_path)) as both:
        expected = alone()
        output = both.processes[0].stdout
        assert output is not None
        found = next((line for line in output if line.startswith("[[")), "")  # gloo writes there, too
        is_alive = any("alive" in line for line in output)
        both.processes[victim].kill()
        start = time.monotonic()
        ends = both.wait()
        assert time.monotonic() - start < HEARTBEAT_SECONDS
    assert is_alive, ends[0][2]
    code, _, text = ends[1 - victim]
    assert code not in (0, -signal.SIGKILL)
    assert f"process {victim} of 2 has ended" in text
    completed, broken_off, said, troubles = json.loads(found)
    assert completed == expected
    assert len(expected) == len(hosts_program.REQUESTS) + 1  # one was aborted
    assert broken_off > 0
    assert [said[0], said[1], said[3]] == [expected[:1]] * 3 and said[2] != expected[:1]
    assert "process 0 of 2" in troubles[0] and "nowhere" in troubles[0]
    assert "replaced by those of a directory" in troubles[1]
    assert "process 1 of 2 follows process 0" in ends[1][2]


@pytest.mark.slow  # two processes start jax and compile
def test_replicas_in_two_processes_share_experts_that_move(tmp_path: Path) -> None:
    fixture = Fixture.load(hosts_program.EXPERTS)
    with two_processes("share experts", str(fixture.write_checkpoint(tmp_path))) as both:
        leads, follows = both.wait()
    assert leads[0] == 0, leads[2]
    assert follows[0] == 0, follows[2]
    found = json.loads(leads[1].splitlines()[-1])
    assert found["greedy"] == [fixture.greedy, fixture.greedy[:1], fixture.greedy, fixture.greedy]
    assert found["num_placements"] > 0
    assert min(found["num_outputs"]) > 0
    num_computed = len(fixture.prompts[0]) + len(fixture.greedy[0]) - 1
    assert found["chosen"] == [num_computed * fixture.config["num_experts_per_tok"]] * 2, "in both layers with experts"
    for name in ("scores", "beams", "vectors"):
        one, other = found[name]
        assert one == other, name


@pytest.mark.slow  # two processes start jax and compile
def test_an_adapter_comes_to_the_devices_of_both_processes(tmp_path: Path) -> None:
    fixture = Fixture.load(hosts_program.ADAPTED)
    model = fixture.write_checkpoint(tmp_path / "model")
    # Of DoRA: the ratios are computed where the layers are, half of them in the other process.
    of_both = {"config": {"use_dora": True}, "tables": ("lm_head", "model.embed_tokens")}
    adapter = RandomAdapter(fixture, seed=1, **of_both).write(tmp_path / "adapter")
    with two_processes("adapt", str(model), str(adapter)) as both:
        with (
            quick_engines(),
            LLM(**hosts_program.options("1x1", model=str(model)), **hosts_program.ADAPTER_ROOM) as llm,
        ):
            expected = hosts_program.adapted(llm, str(adapter))
        leads, follows = both.wait()
    assert leads[0] == 0, leads[2]
    assert follows[0] == 0, follows[2]
    assert json.loads(leads[1].splitlines()[-1]) == expected
    assert expected[0] != expected[2]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("differ", "page_size is 16 in process 0 and 32 in process 1"),
        ("lead twice", "this is process 1 of 2, and only process 0 takes requests: call jaxvllm.follow"),
    ],
    ids=["differ", "lead twice"],
)
def test_a_mistake_ends_both(scenario: str, message: str) -> None:
    with two_processes(scenario) as both:
        (code_0, _, text_0), (code_1, _, text_1) = both.wait()
    assert code_0 and code_1
    assert message in text_1
    assert (message if scenario == "differ" else "other than 0 call is 'follow' in process 0 and 'LLM'") in text_0
