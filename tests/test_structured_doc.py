"""Every example of docs/structured.md runs, in order, as a reader would type them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxvllm import LLM
from tests.faults.server import KEY, serving
from tests.quick import quick_engines

PAGE = Path(__file__).parent.parent / "docs/structured.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    options = dict(max_num_seqs=4, max_num_batched_tokens=64, row_buckets=(4,), token_buckets=(64,), max_model_len=512)
    # The server has the programs as they are served.
    with quick_engines():
        llm = LLM(**options, warm_up="full")
    with serving(tmp_path_factory.mktemp("structured") / "log") as server:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
            yield {"llm": llm, "client": client}
    llm.close()


def test_there_are_ten() -> None:
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("number", range(1, 11))
def test_the_example_runs(number: int, names: dict[str, Any]) -> None:
    exec(EXAMPLES[number - 1], names)
