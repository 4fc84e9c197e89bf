"""`jaxvllm explain`, as a user types it."""

import re

import pytest

from jaxvllm.cli.explain import main
from jaxvllm.explainer.report import Report

pytestmark = pytest.mark.usefixtures("quick_programs")

FLAGS = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--row-buckets", "2", "--token-buckets", "16"]


def test_a_report_is_printed_drawn_and_kept(tmp_path, capsys):
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    files = ["--html", str(page), "--json", str(data)]
    options = ["--temperature", "0", "--max-tokens", "6", "--compilation-cache", str(tmp_path / "cache")]
    assert main(["Hi", "hello there", *files, *options, *FLAGS]) == 0
    out = capsys.readouterr().out
    assert out.startswith("THE BATCH AT WORK\n")
    assert "[0] REQUEST '<|bos|><|user|>Hi<|end|><|assistant|>'" in out  # the model has a chat template
    assert re.search(r"^step 0 +PREFILL  the whole prompt, positions 0-\d; the last query sees \d tokens$", out, re.M)
    report = Report.from_json(data.read_bytes())
    assert str(report) in out
    first = report.explanations[0]
    assert page.read_text() == report.html
    assert all(2 <= len(token.candidates) <= 6 for token in first.tokens)


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "there is no prompt: give one, or several"),
        (["a", "--structured-outputs", "{"], "--structured-outputs { is not valid JSON"),
        (["a", "--structured-outputs", '{"regex": ""}'], "regex must be a string that is not empty"),
        (["a", "--temperature", "-1"], "temperature must be"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(argv, said, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"jaxvllm explain: {said}")
