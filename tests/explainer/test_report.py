"""Reports: the text says what the explanations say, the page loads and obeys nothing, JSON keeps all of it."""

import re

import msgspec
import pytest

from jaxvllm.explainer.report import Report
from jaxvllm.explainer.timeline import columns, mark, notes
from jaxvllm.explainer.words import listed, padded, percent, positions, spelled
from tests.explainer.reports import HOSTILE, hostile_report


def test_json_keeps_everything() -> None:
    report = hostile_report()
    assert Report.from_json(report.to_json()) == report
    with pytest.raises(msgspec.ValidationError):
        Report.from_json(b'{"model": "demo"}')
    with pytest.raises(ValueError, match="1 texts for 2"):
        Report("demo", ("one",), report.explanations)


def test_the_page_loads_nothing_and_ends_where_it_ends() -> None:
    page = hostile_report().html
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "default-src 'none'" in page
    # Addresses may stand in the model's text, which is data, but in nothing that a browser would load.
    outside = re.sub(r'<script id="data".*?</script>|<noscript>.*?</noscript>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|\bimport\b *[{*\"']|@import|url\(|(src|href)=", outside)
    assert re.search(r"^export ", outside, re.MULTILINE) is None
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    shown = msgspec.json.decode(data[1])
    assert shown["report"]["texts"][1] == HOSTILE and len(shown["notes"]) == 2


def test_the_text_says_it_all_and_obeys_nothing() -> None:
    text = str(hostile_report())
    assert "\x1b" not in text
    for line in (
        "step 0    PREFILL  the whole prompt, positions 0-4; the last query sees 5 tokens",
        "batch    2 rows (1 decode, 1 chunk): 2 tokens in a bucket of 16 (14 padding); planned in 0.3 ms, ",
        "pages    slot 0 gets a page table: page 3, 7 new",
        "pages    after preemption 1, slot 1 gets a page table: page 3 from the prefix cache and page 5 new",
        "KV       positions 0-3 -> places 12-15 (page 3); position 4 -> place 28 (page 7)",
        "drafts   3 guessed, 1 accepted",
        "mask     the grammar allows 7 of 64 tokens",
        "grammar  refuses 1 token that came without a mask",
        "1  ' b'            60.7%   else",
        "accepted draft",
        "[1] had lost its slot and its pages before step 1: it was preempted",
        "[1] found 4 tokens in the prefix cache: page 3, written by [0]",
    ):
        assert line in text, line
    timeline = dict(re.findall(r"^  (\[\d\]|tokens|bucket).{19} +(.*)$", text, re.MULTILINE))
    assert {name: row.split() for name, row in timeline.items()} == {
        "[0]": ["P5", "2d1"],
        "[1]": [".", "P1", "x", "F2"],
        "tokens": ["5", "2", "1", "2"],
        "bucket": ["16"] * 4,
    }


def test_one_request_needs_no_timeline() -> None:
    report = hostile_report()
    alone = Report("demo", report.texts[:1], report.explanations[:1])
    assert str(alone).startswith("REQUEST 'xyzwv'")
    assert [mark(step) for column in columns(alone.explanations) for step in column.steps.values()] == ["P5", "2d1"]
    assert notes(alone.explanations) == []
    assert notes(report.explanations[1:]) == [
        "[0] had lost its slot and its pages before step 1: it was preempted",
        "[0] found 4 tokens in the prefix cache: page 3, written by earlier requests",
    ]
    assert alone._repr_html_().startswith('<iframe srcdoc="&lt;!doctype')


def test_words() -> None:
    assert listed([3, 4, 5, 9, 1]) == "3-5, 9, 1" and listed([]) == ""
    assert (positions(4, 1), positions(4, 3, "place")) == ("position 4", "places 4-6")
    assert (percent(0.0), percent(-20.0)) == ("100.0%", "<0.1%")
    assert (padded("ab", 4), padded("日本", 5), padded("abcde", 3)) == ("ab  ", "日本 ", "abcde ")
    assert spelled(None) == "?" and spelled("\x1b\n") == r"'\x1b\n'"
