"""The report of `jaxvllm env` has what a maintainer asks for, and no secret."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxvllm import __version__
from jaxvllm.cli.env import main
from jaxvllm.environment import report
from jaxvllm.environment.text import text

ROOT = Path(__file__).parents[2]


def test_variables_are_shown_and_secrets_are_not():
    secrets = {
        "HF_TOKEN": "hf_abc",
        "JAXVLLM_API_KEY": "sk-abc",
        "JAXVLLM_DP_SECRET": "abc",
        "RAY_redis_password": "abc",
        "HF_HUB_PROXY_AUTH": "abc",
    }
    others = {"XLA_FLAGS": "--xla_a=1", "JAX_PLATFORMS": "cpu", "HF_ENDPOINT": "https://me:abc@hub.example/x"}
    foreign = {"AWS_REGION": "abc", "EDITOR": "abc", "MY_JAX_NOTE": "abc"}
    found = report.shown(secrets | others | foreign)
    assert found == dict.fromkeys(secrets, "(set)") | {
        "XLA_FLAGS": "--xla_a=1",
        "JAX_PLATFORMS": "cpu",
        "HF_ENDPOINT": "https://(hidden)@hub.example/x",
    }
    assert "abc" not in json.dumps(found)


def test_a_home_is_shortened(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    found = report.shown({"PYTHONPATH": f"{tmp_path}/a:{tmp_path}:{tmp_path}-other", "HF_HOME": f"{tmp_path}/hf"})
    assert found == {"HF_HOME": "~/hf", "PYTHONPATH": f"~/a:~:{tmp_path}-other"}


@pytest.fixture(scope="module")
def whole():
    return report.collect({"JAX_COMPILATION_CACHE_DIR": str(ROOT / "sharding"), "HF_TOKEN": "hf_abc"})


def test_the_devices_are_those_of_jax(whole):
    devices = whole["devices"]
    assert (devices["platform"], devices["count"], devices["processes"]) == ("cpu", 8, 1)
    assert devices["attention"]["float32"]["backend"] in ("cpu", "reference")
    assert devices["attention"]["float16"]["backend"] == "reference"
    assert devices["attention"]["float16"]["why"].startswith("attention runs on plain XLA: ")


def test_the_text_has_every_part_of_the_report(whole):
    lines = text(whole).splitlines()
    subjects = [line.split()[0] for line in lines if not line.startswith(" ")]
    order = "jaxvllm Python system CPU memory devices attention packages variables programs"
    assert [name for name in subjects if name != "NVIDIA"] == order.split()
    assert lines[0].startswith(f"jaxvllm     {__version__}, commit ")
    assert "jax 0." in text(whole) and "HF_TOKEN=(set)" in text(whole) and "hf_abc" not in json.dumps(whole)
    cache = whole["caches"][1]
    sizes = [path.stat().st_size for path in (ROOT / "sharding").rglob("*") if path.is_file()]
    assert (cache["bytes"], cache["files"]) == (sum(sizes), len(sizes))


def test_a_device_that_does_not_answer_is_reported():
    found = report.collect({}, device_seconds=0.001)
    assert "within 0.001 s: another process may hold the device" in found["devices"]["error"]
    assert "\ndevices     none: jax found no device" in text(found)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('RuntimeError: no TPU')", "exit code 1: RuntimeError: no TPU"),
        ("import os; os.abort()", "signal 6: no message"),
    ],
)
def test_a_driver_that_ends_the_process_is_reported(program, message, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert report.collect({})["devices"] == {"error": f"looking for devices ended with {message}"}


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr("jaxvllm.cli.env.collect", lambda: {"jaxvllm": 1})
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"jaxvllm": 1}


def test_a_report_without_a_clone_has_no_commit(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(report, "ROOT", tmp_path / "site-packages")
    assert report._commit() is None


def test_the_cpu_has_the_instructions_that_its_kernels_use(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "flags : fpu avx2 fma avx512f avx512_bf16 avx512_vnni amx_tile amx_int8"
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: here)
    assert report._cpu()["features"] == here.split()[3:]
