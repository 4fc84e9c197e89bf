"""`jaxvllm explain ... | head` ends quietly when the reader has enough."""

import os
import subprocess
import sys

import pytest

from jaxvllm.cli import READER_LEFT


@pytest.mark.parametrize("words", [["jaxvllm", "--help"], ["jaxvllm", "generate", "--help"], ["jaxvllm.explain", "-h"]])
def test_a_reader_may_leave(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # before the first byte
    command = [sys.executable, "-m", *words]
    with os.fdopen(writing, "wb") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, timeout=120, check=False)
    # argparse itself ignores an error of the help's last line.
    assert ended.stderr == b"" and ended.returncode in (0, READER_LEFT)
