"""The questions that newcomers are shown are ones that the demo model answers rightly."""

import json
import re
from pathlib import Path

import pytest

from jaxvllm import LLM, SamplingParams
from tests.quick import quick_engines

ROOT = Path(__file__).resolve().parents[2]
# Where questions are shown: the playground's buttons, and what a reader may paste.
PLACES = (
    "jaxvllm/server/playground/index.html",
    "README.md",
    "docs/offline.md",
    "docs/serving.md",
    "docs/http.md",
    "colab/quickstart.ipynb",
)
STORY = r"(?s)[A-Z].{100,}[.!]\W*"
ANSWERS = {
    "Tell me a short story.": STORY,
    "Which day comes after Friday?": r"Saturday comes after Friday\.",
    "What is 12 + 19?": r"12 \+ 19 = 31",
}


def shown(text: str) -> set[str]:
    """The questions in `text` that somebody may put to the model."""
    return set(re.findall(r"\b(?:Tell me|What is|Which day|How many)\b[^\"<>\\]*?[.?](?=[\"<\\])", text))


@pytest.mark.parametrize("place", PLACES)
def test_every_question_is_one_whose_answer_is_checked(place: str) -> None:
    found = shown((ROOT / place).read_text(encoding="utf-8"))
    assert found and found <= set(ANSWERS), f"add the answer of {found - set(ANSWERS)} to this test"


@pytest.mark.slow
def test_the_answers_are_right_at_the_temperature_that_the_model_recommends() -> None:
    assert json.loads((ROOT / "jaxvllm/assets/demo/generation_config.json").read_text())["temperature"] == 0.7
    options = dict(max_model_len=512, row_buckets=(64,), token_buckets=(128,), max_num_batched_tokens=128)
    with quick_engines(), LLM(model="demo", **options) as llm:
        params = SamplingParams(temperature=0.7, n=16, seed=1, max_tokens=300)
        conversations = [[{"role": "user", "content": question}] for question in ANSWERS]
        for question, output in zip(ANSWERS, llm.chat(conversations, params, use_tqdm=False), strict=True):
            wrong = [c.text for c in output.outputs if not re.fullmatch(ANSWERS[question], c.text.strip())]
            assert not wrong, f"{question}: {wrong}"
