"""Clients stay light: a command's help, and a machine without jax."""

import subprocess
import sys

import pytest

COMMANDS = "jaxvllm.cli.chat, jaxvllm.cli.complete, jaxvllm.cli.bench, jaxvllm.cli.run_batch"
CLIENTS = (
    "jaxvllm.client.repl, jaxvllm.client.batch_file, jaxvllm.client.screen, jaxvllm.bench.sweep, jaxvllm.bench.plot"
)


@pytest.mark.parametrize(
    ("modules", "too_heavy"),
    [
        (
            COMMANDS,
            (
                "jax",
                "httpx",
                "rich",
                "numpy",
                "tokenizers",
                "matplotlib",
                "jaxvllm.engine",
                "jaxvllm.worker",
                "jaxvllm.server",
            ),
        ),
        (
            CLIENTS,
            ("jax", "tokenizers", "matplotlib", "fastapi", "zmq", "jaxvllm.engine", "jaxvllm.worker", "jaxvllm.server"),
        ),
    ],
)
def test_what_a_client_loads(modules, too_heavy):
    program = f"import {modules}, sys; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )
    assert sorted(loaded & set(too_heavy)) == []
