"""The worker with torch: what it answers, and that its death or silence costs one case."""

import time
from pathlib import Path

import pytest

from benchmarks.kernels import worker
from benchmarks.kernels.worker import TorchWorker


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs as the worker; a test writes it."""
    path = tmp_path / "worker.py"
    monkeypatch.setattr(worker, "WORKER", path)
    return path


def test_without_torch_or_cuda_every_peer_says_why() -> None:
    worker = TorchWorker()
    assert worker.versions() == {}
    for peer in ("sdpa", "flashinfer", "vllm"):
        assert "torch" in (worker.missing(peer) or "")
    worker.close()


def test_asks_once_who_is_here(script: Path) -> None:
    script.write_text('print(\'{"versions": {"torch": "9"}, "missing": {"vllm": "not installed"}}\')')
    worker = TorchWorker()
    assert worker.versions() == {"torch": "9"}
    assert worker.missing("vllm") == "not installed"
    assert worker.missing("sdpa") is None
    worker.close()


def test_a_dead_worker_is_a_reason_and_starts_anew(script: Path) -> None:
    script.write_text("import sys; sys.stdin.readline(); sys.exit(3)")
    worker = TorchWorker()
    assert "ended with status 3" in (worker.missing("sdpa") or "")
    script.write_text("print('{\"samples\": [1.0]}')")
    assert worker.ask({"peer": "sdpa"}) == {"samples": [1.0]}
    worker.close()


def test_a_silent_worker_is_ended(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "START_SECONDS", 0.1)
    monkeypatch.setattr(worker, "CASE_SECONDS", 0.1)
    script.write_text("import time; time.sleep(600)")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        TorchWorker().ask({"peer": "sdpa"})
    assert time.monotonic() - start < 600
