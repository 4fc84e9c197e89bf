"""Engines that several files share: building one costs seconds. Each test must leave them idle."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxvllm import LLM
from jaxvllm.engine.burst_pace import BurstPace
from tests.engine.tiny import Recomputation, assert_idle, tiny_llm, write_tiny_checkpoint
from tests.quick import earlier_emitters, programs_in_advance, quick_compilation, quick_engines


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """For all modules but those that have a fixture of this name themselves, whose engines need other programs."""
    with quick_engines():
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def recomputation(tiny_checkpoint: Path) -> Recomputation:
    return Recomputation(tiny_checkpoint)


@pytest.fixture(scope="session")
def shared_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    # One token a step: tests of this engine count steps and outputs. Bursts run on the wide one, and in test_bursts.py.
    with quick_engines():
        llm = tiny_llm(tiny_checkpoint, max_decode_burst=1)
    with llm:
        yield llm


@pytest.fixture(scope="session")
def shared_wide_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    wide = dict(max_num_seqs=32, max_num_batched_tokens=64, token_buckets=(64,), num_pages=257)
    # `test_no_compile.py` finds everything compiled there.
    with quick_compilation(), earlier_emitters(), programs_in_advance():
        llm = tiny_llm(tiny_checkpoint, **wide, warm_up="background")
    with llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """8 running requests, 16 tokens a step: a prompt takes several steps."""
    yield from _watched(shared_llm)


@pytest.fixture
def wide_llm(shared_wide_llm: LLM) -> Iterator[LLM]:
    """32 running requests, 64 tokens a step, and compiled programs for 8 and 32 rows."""
    yield from _watched(shared_wide_llm)


@pytest.fixture
def bursting(wide_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The wide one with bursts, in no hurry: the pace of this machine decides nothing."""
    wide_llm.wait_until_compiled()
    pace = BurstPace(max_seconds=1e9)
    for num_rows in range(1, 33):
        pace.measured(num_rows, 1, 1e-3)
    monkeypatch.setattr(wide_llm.engine.replicas[0].pace, "_plain", pace)
    return wide_llm


def _watched(llm: LLM) -> Iterator[LLM]:
    llm.engine.replicas[0].scheduler.cache.reset_prefix_cache()
    yield llm
    assert_idle(llm)
